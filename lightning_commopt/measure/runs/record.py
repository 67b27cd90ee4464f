"""RunRecord: the settings and results of a run in ``run.json``, with the results of ``plan="auto"``."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from lightning_commopt.measure.plain import errors_naming, from_plain, read_object, write_json
from lightning_commopt.measure.runs.files import RUN_FILE
from lightning_commopt.measure.runs.settings import Settings, Value
from lightning_commopt.text.formatting import text_of

Status = Literal["running", "finished", "failed"]

# How the options of the config group ``commopt_record`` take the name of the loss.
_OPTIONS: dict[Value, str] = {
    "callbacks": "callbacks.commopt_run.val_loss=NAME",
    "trainer": "trainer.callbacks.2.val_loss=NAME",
}
_GIT_LIMIT_S = 5  # git looks at every tracked file, and the fit does not begin before it answers
_VALIDATION = ("val", "valid", "validation")
# The words that may follow "val", "valid" or "validation" in the name of the metric for a field of `RunRecord`.
ENDINGS = {"val_loss": ("loss",), "val_accuracy": ("accuracy", "acc")}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. None means unknown."""

    status: Status  # "running" until the end; a run that was killed keeps it
    # The name of the compressor; "none" for DDP's own all-reduce, "auto" for ``plan="auto"``, or the class of another
    # strategy.
    sync_method: str
    plan_name: str | None = None  # the plan in few words, with all that differs from the defaults
    settings: Settings = field(default_factory=Settings)  # the settings of the run, including its plan
    strategy: str | None = None  # class of the Lightning strategy
    device: str | None = None  # name of rank 0's GPU, or "cpu"
    is_lossy: bool | None = None  # whether the compressor changes gradients; None without a plan
    world_size: int | None = None  # number of ranks that trained
    started_at: str | None = None  # local time with its offset, ISO 8601
    seconds: float | None = None  # duration of the whole run, with set-up and validation
    load_at_start: float | None = None  # `load_average` of rank 0's host when the run began, to tell a busy machine
    load_at_end: float | None = None  # the same at its end; much of it is the run's own
    # Optimizer steps per second, without warm-up and validation, as measured by `SpeedMonitor`, or else by
    # `CommTimeMonitor`.
    steps_per_s: float | None = None
    samples_per_s: float | None = None  # the same in samples, over all ranks
    num_timed_steps: int | None = None  # number of steps behind the two rates
    wire_bytes_per_step: float | None = None  # payload that one rank hands to collectives for its gradients
    tuning: dict[str, Any] = field(default_factory=dict)  # the results of ``plan="auto"``; empty without it
    comm_time: dict[str, float] = field(default_factory=dict)  # the rest of `CommTimeMonitor`'s summary, if it ran
    peak_memory_bytes: float | None = None  # largest peak of any rank: allocated on a GPU, else resident
    num_parameters: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # last values of all metrics that the model logged
    metric_names: dict[str, str] = field(default_factory=dict)  # the metrics that are `val_loss` and `val_accuracy`
    versions: dict[str, str] = field(default_factory=dict)  # versions of Python and packages
    hardware: tuple[dict[str, Any], ...] = ()  # the CPU and the GPUs, with names, memory and cores
    git: dict[str, Any] | None = None  # commit, and whether files differed from it
    error: str | None = None  # why the run failed

    @property
    def val_loss(self) -> float | None:
        """The final validation loss."""
        return self.metrics.get(self.metric_names.get("val_loss", "val_loss"))

    @property
    def val_accuracy(self) -> float | None:
        """The final validation accuracy."""
        return self.metrics.get(self.metric_names.get("val_accuracy", "val_accuracy"))

    @property
    def is_observed(self) -> bool:
        """Whether `CommTimeMonitor`, if there was one, saw the gradient sync; it sees none of FSDP or DeepSpeed."""
        return (self.world_size or 1) == 1 or self.comm_time.get("comm_s") != 0

    @property
    def exposed_share(self) -> float | None:
        """Share of a step that waits for communication, 0 to 1; None if it was not observed."""
        return self.comm_time.get("exposed_share") if self.is_observed else None

    def save(self, folder: Path, **changed: Any) -> RunRecord:
        """Writes the record with some changed fields into the folder of its run, atomically; returns what it wrote."""
        record = dataclasses.replace(self, **changed)
        write_json(folder / RUN_FILE, dataclasses.asdict(record) | record.settings.to_record())
        return record

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Reads the record from the folder of its run.

        Raises:
            FileNotFoundError: there is no record.
            ValueError: the file holds something else.
        """
        path = folder / RUN_FILE
        values = read_object(path, "record of a run")
        for key in ("status", "sync_method"):
            if key not in values:
                raise ValueError(f"{path} is not a record of a run: it has no {key!r}")
        with errors_naming(path):
            return from_plain(cls, values | {"settings": Settings.fields_in(values)})


def find_metric(names: Iterable[str], field: str) -> str | None:
    """Returns the name of the metric for a field of the record, one of `ENDINGS`; None if no name matches.

    A name matches if it is, or ends in, ``val_loss``, ``valid_loss`` or ``validation_loss``, in any case and with any
    of ``/ _ . -`` and blanks between the words. The shortest one wins, then the alphabetically first.

    >>> find_metric(["train/loss", "val/loss", "val/acc"], "val_loss")
    'val/loss'
    >>> find_metric(["val/acc_best", "model.Validation-Accuracy"], "val_accuracy")
    'model.Validation-Accuracy'
    >>> find_metric(["interval_loss", "val_loss_scale"], "val_loss") is None
    True
    """
    endings = [(validation, ending) for validation in _VALIDATION for ending in ENDINGS[field]]
    matching = [name for name in names if tuple(re.split(r"[/_.\-\s]+", name.lower())[-2:]) in endings]
    return min(matching, key=lambda name: (len(name), name), default=None)


def how_to_name_loss(metrics: Iterable[str], settings: Settings, named: str | None) -> str:
    """Returns how to name the final loss of a run with these settings, if none of the logged metrics matched.

    ``named`` is the name that the run has for it, if there is one.
    """
    option = _OPTIONS.get(settings.get("commopt_record"), "RunRecorder(val_loss=NAME)")
    logged = ", ".join(sorted(metrics)) or "nothing"
    lacking = "ends in val_loss or val/loss" if named is None else f"is named {named!r}"
    return f"no metric {lacking} (logged: {logged}); name it with {option}"


def new_record(sync_method: str, started_in: Path, **fields: Any) -> RunRecord:
    """Returns the record of a run that begins now on this machine, with further ``fields``.

    ``started_in`` is a folder of the repository with the run's code, if there is one.
    """
    # This import is not at the top of the module, because reading a record must not import torch.
    from lightning_commopt.measure.runs.machine import devices, versions

    return RunRecord(
        status="running",
        sync_method=sync_method,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(),
        hardware=tuple(devices()),
        git=git_state(started_in),
        load_at_start=load_average(),
        **fields,
    )


def finish_record(folder: Path, metrics: Mapping[str, float], *, seconds: float) -> RunRecord:
    """Records that a run has finished after some seconds; metrics of its last validation replace the fit's."""
    record = RunRecord.load(folder)
    names = dict(record.metric_names)
    for name in ENDINGS:
        if name not in names and (metric := find_metric(metrics, name)) is not None:
            names[name] = metric
    changed = {"metrics": {**record.metrics, **metrics}, "metric_names": names, "load_at_end": load_average()}
    return record.save(folder, status="finished", seconds=seconds, **changed)


def fail_record(
    folder: Path,
    reason: str,
    *,
    unfinished: RunRecord | None = None,
    seconds: float | None = None,
    is_final: bool = False,
) -> RunRecord | None:
    """Records why a run failed after some seconds; returns its record, None without one.

    An earlier reason is kept unless ``is_final``, because the first one is the cause: the other ranks follow with
    errors of their connections. If the run has no record, ``unfinished`` is used; without that nothing is written.
    """
    try:
        record = RunRecord.load(folder)
    except (OSError, ValueError):
        if unfinished is None:
            return None
        record = unfinished
    if record.status == "failed" and not is_final:
        return record
    known = {} if seconds is None else {"seconds": seconds}
    return record.save(folder, status="failed", error=reason, **known)


def fail_rank(folder: Path, error: BaseException, *, rank: int, seconds: float) -> None:
    """Records that an error ended a rank, and so the run, if it has a record. Never raises, to not hide the error."""
    reason = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")  # Ctrl-C has no text
    with suppress(OSError):
        fail_record(folder, reason if rank == 0 else f"rank {rank}: {reason}", seconds=seconds)


def load_average() -> float | None:
    """Returns how many processes ran or waited for a core, on average over the last minute; None where unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:  # some containers hide it
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository around a folder and whether files differ; None without a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, dirty, _ = answer.stdout.strip().partition("-dirty")
    return {"commit": commit, "has_changes": bool(dirty)}


@dataclass(frozen=True, kw_only=True)
class TriedPlan:
    """A plan of a search."""

    plan: str
    predicted_s: tuple[float, float, float] | None  # predicted step time and its interval; None without a prediction
    gain: tuple[float, float, float] | None  # share of a step that it saves, with its interval; None if not timed


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps with one plan. The first is counted from 0 in the fit."""

    plan: str
    first_step: int
    num_steps: int
    seconds: Sequence[float | None]  # step times on the slowest rank, or means of several; None: not counted

    @property
    def end_step(self) -> int:
        return self.first_step + self.num_steps

    @property
    def steps_per_number(self) -> int:
        return self.num_steps // max(1, len(self.seconds))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The results of a fit's searches for a plan."""

    status: str  # why the last search has ended, or its stage
    base_step_s: float | None  # time of a step with the user's plan when plans were last compared; None before
    chosen: str  # name of the plan at the end of the fit
    num_search_steps: int  # number of steps in all searches
    lost_steps: float  # time lost to searching, in steps with the user's plan
    calibration_lost_steps: float  # the part of `lost_steps` that calibrations have cost
    candidates: Sequence[TriedPlan]  # the user's plan, then the others
    not_allowed: Mapping[str, float]  # compressors by name, each with the share of a step that it could save at most
    events: Sequence[tuple[int, str]]  # step of the fit; "drift" or "check", "rolled back" or "forbidden"
    verdict: str  # one or more sentences
    history: Sequence[Stretch]  # all steps up to the last decision, or up to the limit of steps that are kept
