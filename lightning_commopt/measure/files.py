"""The files of a run: every rank's steps as lines of JSON, which survive a process that is killed.

``<run_dir>/comm_time/rank_<rank>.jsonl`` holds, for each fit, a line of type "run" (who wrote it), a line of type
"layout" whenever the buckets changed, and a line of type "step" for every step: `StepRecord.to_json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import count

FOLDER = "comm_time"
"""In the run's directory."""

FORMAT = 1
"""Of the files. A later version that changes what a line means raises it; new keys and types of lines do not."""


def rank_file(run_dir: str | Path, rank: int) -> Path:
    """Returns where a rank's steps are."""
    return Path(run_dir) / FOLDER / f"rank_{rank}.jsonl"


class StepWriter:
    """Appends one rank's steps to its file, which is made by the first of them.

    The file is open only while it is written to: nothing has to be closed, and a fork inherits nothing.

    Args:
        path: of the file, as `rank_file` gives it.
        header: what to say of the rank, in values of JSON: "rank", "world_size", "origin_unix_s" of its clock, and
            whatever else a reader may want to know.

    Raises:
        TypeError: the header has values that JSON does not know.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._path = path
        self._header = json.dumps({"type": "run", "format": FORMAT, **header})
        self._has_header = False
        self._layout: tuple[BucketInfo, ...] = ()

    def write(self, records: Sequence[StepRecord], layout: Mapping[int, BucketInfo]) -> None:
        """Appends steps; the data has been handed to the operating system on return.

        Args:
            records: the steps, the oldest first; without any, nothing is written.
            layout: their buckets by index; written if it is another than in the call before.

        Raises:
            OSError: the file cannot be written. It is then as it was before, unless the file system fails at that as
                well, and the same call may be made again.
        """
        if not records:
            return
        buckets = tuple(layout[index] for index in sorted(layout))
        lines = [] if self._has_header else [self._header]
        if buckets != self._layout:
            lines.append(_layout_to_json(buckets))
        lines += [f'{{"type":"step",{record.to_json()[1:]}' for record in records]
        _append(self._path, "".join([f"{line}\n" for line in lines]).encode())
        self._has_header, self._layout = True, buckets


@dataclass(frozen=True, kw_only=True)
class RankRecords:
    """One rank's steps in one fit.

    Attributes:
        path: of the file that they are from.
        rank: who wrote it.
        world_size: number of ranks that trained.
        origin_unix_s: second 0 of the records' times, in seconds since 1970 on the rank's host; None if unknown.
        header: the whole first line.
        steps: in the order in which they were made.
        layouts: for each of the steps, its buckets by index; empty where nobody saw any. `BucketInfo.is_last` is that
            of the highest index.
        num_broken_lines: lines that could not be read, and are left out.
    """

    path: Path
    rank: int
    world_size: int
    origin_unix_s: float | None
    header: Mapping[str, Any]
    steps: tuple[StepRecord, ...]
    layouts: tuple[Mapping[int, BucketInfo], ...]
    num_broken_lines: int

    def origin_shift_s(self, first: RankRecords) -> float | None:
        """Returns what to add to the times to have them on the first rank's clock, as far as hosts' clocks agree."""
        if self.origin_unix_s is None or first.origin_unix_s is None:
            return None
        return self.origin_unix_s - first.origin_unix_s


def read_run(run_dir: str | Path, *, fit: int = -1) -> list[RankRecords]:
    """Reads what the ranks of a run have written, whole or cut off.

    A fit that was resumed in the same directory continues the files. If it had another number of ranks, files of ranks
    that it lacks are left out.

    Args:
        run_dir: the directory that has ``comm_time``.
        fit: which of the fits in the files, as an index: -1 is the last one, 0 the first.

    Returns:
        The ranks, in their order. `notices` says what is missing.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the files have no such fit, or are of a later version.
    """
    folder = Path(run_dir) / FOLDER
    paths = sorted(folder.glob("rank_*.jsonl"))
    if not paths:
        what = "has no records of steps" if Path(run_dir).is_dir() else "does not exist"
        raise FileNotFoundError(f"{run_dir} {what}: expected {rank_file(run_dir, 0)}, as CommTimeMonitor writes it")
    fits_of_files = [fits for path in paths if (fits := _read_fits(path))]
    if not fits_of_files:
        raise ValueError(f"{folder}: none of its files ({len(paths)}) begins with a line of type 'run'")
    found = [fits[fit] for fits in fits_of_files if -len(fits) <= fit < len(fits)]
    if not found:
        raise ValueError(
            f"fit={fit}: the files in {folder} hold {count(max(map(len, fits_of_files)), 'fit')}, counted from 0"
        )
    newest = max(found, key=lambda records: records.origin_unix_s or 0.0)
    found = [records for records in found if records.world_size == newest.world_size]
    return sorted(found, key=lambda records: records.rank)


def notices(ranks: Sequence[RankRecords]) -> list[str]:
    """Returns what a reader of these records should know: lines and ranks that are missing."""
    lines = [
        f"{records.path}: {count(records.num_broken_lines, 'broken line')} left out; a killed process cuts off its last"
        for records in ranks
        if records.num_broken_lines
    ]
    world_size = max((records.world_size for records in ranks), default=0)
    missing = sorted(set(range(world_size)) - {records.rank for records in ranks})
    if missing:
        lines.append(f"ranks without records: {', '.join(map(str, missing))} (of {world_size} ranks)")
    return lines


@dataclass
class _Fit:
    """What was read of a fit so far; without a header it is none."""

    header: Mapping[str, Any] | None = None
    layout: dict[int, BucketInfo] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    layouts: list[Mapping[int, BucketInfo]] = field(default_factory=list)
    num_broken_lines: int = 0

    def take(self, values: Mapping[str, Any]) -> None:
        """Takes in what a line says; lines of types from later versions are passed over."""
        if values["type"] == "run":
            origin_unix_s = values.get("origin_unix_s")
            self.header = {
                **values,
                **{name: int(values[name]) for name in ("format", "rank", "world_size")},
                "origin_unix_s": None if origin_unix_s is None else float(origin_unix_s),
            }
        elif values["type"] == "layout":
            self.layout = _layout_from_plain(values["buckets"])
        elif values["type"] == "step":
            record = StepRecord.from_dict(dict(values))
            if not record.phases:
                raise ValueError("a step without times")
            self.steps.append(record)
            self.layouts.append(self.layout)


def _read_fits(path: Path) -> list[RankRecords]:
    fits = [_Fit()]
    with path.open("rb") as file:
        for line in file:
            try:
                values = json.loads(line) if line.strip() else {"type": "blank"}
                if values["type"] == "run":
                    fits.append(_Fit())
                fits[-1].take(values)
            except (ValueError, KeyError, TypeError):
                fits[-1].num_broken_lines += 1
    return [_records(fit, fit.header, path) for fit in fits if fit.header is not None]


def _records(fit: _Fit, header: Mapping[str, Any], path: Path) -> RankRecords:
    if header["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {header['format']}, and this version reads up to {FORMAT}: install a later"
            " lightning_commopt"
        )
    return RankRecords(
        path=path,
        rank=header["rank"],
        world_size=header["world_size"],
        origin_unix_s=header["origin_unix_s"],
        header=header,
        steps=tuple(fit.steps),
        layouts=tuple(fit.layouts),
        num_broken_lines=fit.num_broken_lines,
    )


def _append(path: Path, data: bytes) -> None:
    """Appends whole lines to a file, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a process that was killed left a part of a line
                data = b"\n" + data
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def _layout_to_json(buckets: Sequence[BucketInfo]) -> str:
    plain = [
        {"index": bucket.index, "gradient_bytes": bucket.gradient_bytes, "names": list(bucket.names)}
        for bucket in buckets
    ]
    return json.dumps({"type": "layout", "buckets": plain})


def _layout_from_plain(buckets: Sequence[Mapping[str, Any]]) -> dict[int, BucketInfo]:
    last = max((int(bucket["index"]) for bucket in buckets), default=0)
    return {
        int(bucket["index"]): BucketInfo(
            index=int(bucket["index"]),
            gradient_bytes=int(bucket["gradient_bytes"]),
            names=tuple(map(str, bucket["names"])),
            is_last=int(bucket["index"]) == last,
        )
        for bucket in buckets
    }
