"""Writes and reads every rank's steps as JSON lines, which survive a killed process.

``<run_dir>/comm_time/rank_<rank>.jsonl`` holds, for each fit, a line of type "run" (rank and settings), a line of type
"layout" whenever the buckets changed, one of type "change" whenever the plan did, and a line of type "step" for every
step: `StepRecord.to_json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.plain import check_format, parse_json
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import numbers_text

FOLDER = "comm_time"  # name of the folder in the run's directory
FORMAT = 1  # version of the files, raised when a line changes its meaning; new keys and types of lines keep it

_CHANGING = ("comm_hook", "is_lossy", "plan")  # what lines of type "change" change in the header


def rank_file(run_dir: str | Path, rank: int) -> Path:
    """Returns the path of a rank's steps."""
    return Path(run_dir) / FOLDER / f"rank_{rank}.jsonl"


class StepWriter:
    """Appends one rank's steps to its file, created with the first step.

    The file is open only during writes: nothing has to be closed, and a fork inherits nothing. If something else has
    written to it in between, such as another run in the same directory, the header is written again before the next
    steps.

    Args:
        path: path of the file, from `rank_file`.
        header: a JSON-serializable mapping with the rank's "rank", "world_size", "origin_unix_s" of its clock, and
            anything else. "fit" must be equal on all ranks of a fit and different in every other fit.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._values = dict(header)
        self._header = self._header_line()
        self._changed: dict[str, Any] = {}  # since the last write
        self._size: int | None = None  # the size of the file after the last write; None before the first one
        self._layout: Mapping[int, BucketInfo] = {}

    def change(self, values: Mapping[str, Any]) -> None:
        """Changes the plan in the header: "comm_hook", "is_lossy" or "plan" of the steps that will be written next."""
        changed = {name: value for name, value in values.items() if self._values.get(name) != value}
        if changed:
            self._values |= changed
            self._changed |= changed
            self._header = self._header_line()

    def _header_line(self) -> str:
        return json.dumps({"type": "run", "format": FORMAT, **self._values})

    def write(self, records: Sequence[StepRecord]) -> None:
        """Appends steps, the oldest first. On return the operating system has the data.

        Raises:
            OSError: the file cannot be written. Partial data is removed again if possible; the call may be repeated.
        """
        if not records:
            return
        lines, layout = ([], self._layout) if self._size == _size(self._path) else ([self._header], {})
        if not lines and self._changed:
            lines.append(json.dumps({"type": "change", **self._changed}))
        for record in records:
            if record.layout != layout:
                layout = record.layout
                buckets = [layout[index] for index in sorted(layout)]
                plain = [{"index": b.index, "gradient_bytes": b.gradient_bytes, "names": b.names} for b in buckets]
                lines.append(json.dumps({"type": "layout", "buckets": plain}))
            lines.append(f'{{"type":"step",{record.to_json()[1:]}')
        self._size = _append(self._path, "".join([f"{line}\n" for line in lines]).encode())
        self._layout, self._changed = layout, {}


@dataclass(kw_only=True)
class RankRecords:
    """One rank's steps in one fit."""

    path: Path
    header: Mapping[str, Any]  # the content of the fit's line of type "run", with what changed since
    rank: int  # the rank that wrote the file
    world_size: int  # number of ranks that trained
    origin_unix_s: float  # second 0 of the records' times, in seconds since 1970
    # The steps in the order in which they were written. The file does not say which bucket is the last of a backward,
    # so the one with the highest index counts as the last.
    steps: list[StepRecord] = field(default_factory=list)
    num_before_change: int = 0  # the first steps, which had another plan than the header has
    # Lines that could not be read, by their number in the file, counted from 1; each with the reason.
    broken_lines: dict[int, str] = field(default_factory=dict)
    is_cut: bool = False  # whether the file ends within a line, as after a killed process; that line is ignored

    @property
    def fit(self) -> tuple[int, Any]:
        """Number of ranks and "fit" of the header."""
        return self.world_size, self.header.get("fit")

    @classmethod
    def of_header(cls, path: Path, values: Mapping[str, Any]) -> RankRecords:
        known: dict[str, Any] = {name: int(values[name]) for name in ("rank", "world_size")}
        known["origin_unix_s"] = float(values["origin_unix_s"])
        others: dict[str, Any] = {
            name: int(values[name]) for name in ("format", "num_warmup_steps") if name in ("format", *values)
        }
        return cls(path=path, header={**values, **others, **known}, **known)

    def origin_shift_s(self, first: RankRecords) -> float:
        """Returns the offset to the first rank's clock. It is as exact as the hosts' clocks agree."""
        return self.origin_unix_s - first.origin_unix_s

    def add_line(self, values: Mapping[str, Any], layout: Mapping[int, BucketInfo]) -> Mapping[int, BucketInfo]:
        """Adds the content of a line, and returns the layout from there on. Unknown types of lines are ignored."""
        if values["type"] == "layout":
            buckets = [
                (int(bucket["index"]), int(bucket["gradient_bytes"]), tuple(map(str, bucket["names"])))
                for bucket in values["buckets"]
            ]
            last = max((index for index, *_ in buckets), default=0)
            return {bucket[0]: BucketInfo(*bucket, is_last=bucket[0] == last) for bucket in buckets}
        if values["type"] == "change":
            self.header = {**self.header, **{name: values[name] for name in _CHANGING if name in values}}
            self.num_before_change = len(self.steps)
        if values["type"] == "step":
            record = StepRecord.from_dict(values, layout)
            if not record.phases or not math.isfinite(record.end_s):
                raise ValueError("a step without times")
            if not all(start_s <= end_s for _, start_s, end_s in record.phases):
                raise ValueError("a phase ends before it begins")
            self.steps.append(record)
        return layout


def read_run(run_dir: str | Path) -> list[RankRecords]:
    """Reads the steps of all ranks in the last fit of a run, complete or cut off.

    A fit that was resumed in the same directory continues the files. The files of ranks that have not written in it
    are ignored. The ranks are in order; `notices` lists what is missing.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the files have no fit, or are of a later version.
    """
    folder = Path(run_dir) / FOLDER
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        problem = "has no records of steps"
        if not Path(run_dir).is_dir():
            problem = "is not a directory" if Path(run_dir).exists() else "does not exist"
        is_own_folder = Path(run_dir).name == FOLDER and any(Path(run_dir).glob("rank_*.jsonl"))
        hint = f"; did you mean its parent, {Path(run_dir).parent}?" if is_own_folder else ""
        expected = rank_file(run_dir, 0)
        raise FileNotFoundError(f"{run_dir} {problem}: expected {expected}, which CommTimeMonitor writes{hint}")
    ranks, unreadable = [], ""
    for path in paths:
        try:
            ranks.append(_read_last_fit(path))
        except _NoFitError as error:
            unreadable = unreadable or str(error)
    if not ranks:
        raise ValueError(f"{folder}: none of the {len(paths)} files of ranks can be read. {unreadable}")
    newest = max(ranks, key=lambda records: records.origin_unix_s)
    ranks = [records for records in ranks if records.fit == newest.fit]
    return sorted(ranks, key=lambda records: records.rank)


def notices(ranks: Sequence[RankRecords]) -> list[str]:
    """Returns a sentence for each part of the run that these records lack: lines of files, and ranks."""
    lines = []
    for records in ranks:
        if broken := records.broken_lines:
            first = f"line {min(broken)}: {broken[min(broken)]}"
            problem = first if len(broken) == 1 else f"{len(broken)} lines ({numbers_text(broken)}), the first {first}"
            lines.append(f"{records.path} is damaged, and this is ignored: {problem}")
        if records.is_cut:
            lines.append(f"{records.path}: its last line is cut off, probably by a killed process, and is ignored")
    world_size = max((records.world_size for records in ranks), default=0)
    missing = sorted(set(range(world_size)) - {records.rank for records in ranks})
    for rank in [*missing]:
        try:
            _read_last_fit(ranks[0].path.with_name(f"rank_{rank}.jsonl"))
        except _NoFitError as error:
            lines.append(f"rank {rank} is ignored: {error}")
            missing.remove(rank)
        except (OSError, ValueError):  # the file does not exist, or belongs to another fit
            pass
    if missing:
        lines.append(f"ranks without records: {', '.join(map(str, missing))} (of {world_size} ranks)")
    return lines


def common_steps(ranks: Sequence[RankRecords]) -> dict[int, tuple[StepRecord, ...]]:
    """Returns the steps that all ranks have recorded, by number in rising order, as the records of the ranks."""
    by_rank = [{record.step: record for record in records.steps} for records in ranks]
    return {number: tuple(own[number] for own in by_rank) for number in sorted(set.intersection(*map(set, by_rank)))}


def steps_of_plan(ranks: Sequence[RankRecords]) -> dict[int, tuple[StepRecord, ...]]:
    """Returns the `common_steps` that had, on all ranks, the plan that the headers have."""
    earlier = {record.step for records in ranks for record in records.steps[: records.num_before_change]}
    return {number: steps for number, steps in common_steps(ranks).items() if number not in earlier}


class _NoFitError(ValueError):
    """A file has no header of a fit that can be read."""


def _read_last_fit(path: Path) -> RankRecords:
    last: RankRecords | None = None
    fit: RankRecords | None = None  # the fit that the present lines belong to; None if its header cannot be read
    layout: Mapping[int, BucketInfo] = {}
    first_reason = "it is empty"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                values = _parse(line)
                if values["type"] == "run":
                    fit, layout = None, {}
                    last = fit = RankRecords.of_header(path, values)
                elif fit is not None:
                    layout = fit.add_line(values, layout)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                if number == 1:
                    first_reason = f"line 1: {reason}"
                if last is not None and not line.endswith(b"\n"):
                    last.is_cut = True
                elif last is not None and (fit is not None or b'"run"' in line):
                    last.broken_lines[number] = reason
    if last is None:
        raise _NoFitError(f"{path} has no line of type 'run' that can be read ({first_reason})")
    check_format(path, last.header["format"], FORMAT)
    return last


def _parse(line: bytes) -> dict[str, Any]:
    if not line.strip():
        return {"type": "blank"}
    values = parse_json(line, allow_nan=False)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append(path: Path, data: bytes) -> int:
    """Appends whole lines to a file, or nothing; returns the size of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a killed process has left a part of a line
                data = b"\n" + data
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise
        return size + len(data)
