"""Writes ``run.json`` from the beginning of a run to its end; no other module does."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_commopt.measure.runs.record import RunRecord, find_metric

_GIT_LIMIT_S = 5


def new_record(
    sync_method: str,
    started_in: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    chosen: Sequence[str] = (),
) -> RunRecord:
    """Returns the record of a run that begins now, on this machine; for the arguments see `RunRecord`.

    Its code is in the repository that has the folder ``started_in``, if there is one.
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
    """Writes the record of a run with some changed fields, and returns it; an OSError leaves the old file."""
    record = dataclasses.replace(record, **fields)
    record.save(folder)
    return record


def finish_record(folder: Path, metrics: Mapping[str, float], *, seconds: float) -> RunRecord:
    """Records that a run has finished after some seconds; metrics of its last validation replace those of the fit."""
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
    """Records why a run failed after some seconds; returns its record, None without one.

    An earlier reason is kept unless ``is_final``: the first one is the cause, as the other ranks follow with errors of
    their connections. If the run has no record, ``unfinished`` is used; without that nothing is written.
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
    """Records that an error ended a rank, and so the run, if it has a record; never raises, as that would hide it."""
    reason = f"{type(error).__name__}: {error}"
    with suppress(OSError):
        fail_record(folder, reason if rank == 0 else f"rank {rank}: {reason}", seconds=seconds)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the repository around a folder and whether files differ; None without a repository."""
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
