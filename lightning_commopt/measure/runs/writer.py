"""Writes ``run.json``: the only place that does, from the beginning of a run to its end."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_commopt.measure.runs.metric_names import find_metric
from lightning_commopt.measure.runs.record import RunRecord

_GIT_LIMIT_S = 5


def new_record(
    sync_method: str,
    started_in: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    chosen: Sequence[str] = (),
) -> RunRecord:
    """Returns the record of a run that begins now, on this machine.

    Args:
        sync_method: see `RunRecord`.
        started_in: within the repository that the run is made from, if there is one.
        settings: see `RunRecord`, as the next two.
        overrides: of Hydra's command line.
        chosen: what they set.
    """
    from lightning_commopt.measure.runs.machine import devices, versions  # with torch, which no reader needs

    return RunRecord(
        status="running",
        sync_method=sync_method,
        settings=dict(settings or {}),
        overrides=tuple(overrides),
        chosen=tuple(chosen),
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions=versions(),
        hardware=tuple(dataclasses.asdict(device) for device in devices()),
        git=git_state(started_in),
    )


def write_record(folder: Path, record: RunRecord, **fields: Any) -> RunRecord:
    """Writes the record of a run.

    Args:
        folder: of the run.
        record: what is known of it.
        **fields: of the record, that are now something else.

    Returns:
        What was written.

    Raises:
        OSError: it cannot be written; what was there is left.
    """
    record = dataclasses.replace(record, **fields)
    record.save(folder)
    return record


def finish_record(folder: Path, metrics: Mapping[str, float], *, seconds: float) -> RunRecord:
    """Writes that a run has finished, with the metrics of a validation after the fit.

    Args:
        folder: of the run.
        metrics: that the validation logged; they replace those of the fit.
        seconds: that the run took.
    """
    record = RunRecord.load(folder)
    names, values = dict(record.metric_names), dict[str, float]()
    for field in ("val_loss", "val_accuracy"):
        found = names.get(field) or find_metric(metrics, field)
        if found is not None and found in metrics:
            names[field], values[field] = found, metrics[found]
    metrics = {**record.metrics, **metrics}
    return write_record(
        folder, record, status="finished", seconds=seconds, metrics=metrics, metric_names=names, **values
    )


def fail_record(
    folder: Path,
    reason: str,
    *,
    unfinished: RunRecord | None = None,
    seconds: float | None = None,
    is_final: bool = False,
) -> RunRecord | None:
    """Writes why a run has failed, unless there is a reason already.

    The first reason is the cause: when a rank has failed, the others follow with errors of their connections.

    Args:
        folder: of the run.
        reason: for which it has failed.
        unfinished: what to take where the run has no record; None to write nothing then.
        seconds: for which it ran; None if nobody knows.
        is_final: replace an earlier reason.

    Returns:
        What was written, or was there; None without a record.

    Raises:
        OSError: it cannot be written.
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
    return write_record(folder, record, status="failed", error=reason, **known)


def fail_rank(folder: Path, error: BaseException, *, rank: int, seconds: float) -> None:
    """Writes that an error has ended a rank, and by that the run; never raises, as that would hide the error.

    Args:
        folder: of the run; without a record in it nothing is written.
        error: that has ended the rank.
        rank: its number.
        seconds: for which it ran.
    """
    reason = f"{type(error).__name__}: {error}"
    with suppress(OSError):
        fail_record(folder, reason if rank == 0 else f"rank {rank}: {reason}", seconds=seconds)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit that is checked out and whether files differ from it; None where there is no repository.

    Args:
        folder: any folder within the repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "has_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
