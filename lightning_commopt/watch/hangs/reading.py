"""Reads what watchers left in a folder, also of a job that was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from lightning_commopt.watch.hangs import marks as kinds
from lightning_commopt.watch.hangs.diagnosis import Diagnosis, diagnose
from lightning_commopt.watch.hangs.records import REPORT
from lightning_commopt.watch.hangs.snapshot import RankSnapshot


class TimedMark(NamedTuple):
    """A mark in seconds since 1970, so that ranks of several hosts can be compared."""

    at_unix_s: float
    kind: int
    code: int
    value: int


@dataclass(frozen=True)
class LeftBehind:
    """What a run has left.

    Attributes:
        diagnosis: that was reported; otherwise made from the last states of the ranks.
        was_reported: whether watchers have reported a hang.
        at_unix_s: when it was reported, or when the last rank was seen.
        snapshots: of the ranks that left one.
        marks: of these, the oldest first.
    """

    diagnosis: Diagnosis
    was_reported: bool
    at_unix_s: float
    snapshots: list[RankSnapshot]
    marks: dict[int, list[TimedMark]]


def read_left_behind(folder: Path) -> LeftBehind:
    """Returns what is in a folder.

    Args:
        folder: ``hangs``, or the one above it.

    Raises:
        FileNotFoundError: there is no file of a watcher.
        ValueError: a file is no JSON, or not of a watcher.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no directory")
    folder = folder / "hangs" if (folder / "hangs").is_dir() else folder
    by_rank: dict[int, RankSnapshot] = {}
    marks: dict[int, list[TimedMark]] = {}
    last_s = 0.0
    for path in sorted(folder.glob("rank_*.json")):
        plain = _load(path)
        with _named(path):
            snapshot = RankSnapshot.from_plain(plain)
            by_rank[snapshot.rank] = snapshot
            marks[snapshot.rank] = [TimedMark(*mark) for mark in plain["marks"]]
            last_s = max(last_s, plain["written_unix_s"])
    report = folder / REPORT
    if not by_rank and not report.exists():
        raise FileNotFoundError(
            f"{folder} has no {REPORT} and no rank_*.json: HangMonitor leaves them when a run hangs"
        )
    if not report.exists():
        snapshots = [by_rank[rank] for rank in sorted(by_rank)]
        return LeftBehind(diagnose(snapshots), False, last_s, snapshots, marks)
    plain = _load(report)
    with _named(report):
        diagnosis = Diagnosis(**{each.name: _as_tuple(plain[each.name]) for each in fields(Diagnosis)})
        snapshots = [RankSnapshot.from_plain(each) for each in plain["snapshots"]]
        return LeftBehind(diagnosis, True, plain["time_unix_s"], snapshots, marks)


def phases_of(marks: list[TimedMark]) -> list[tuple[float, int]]:
    """Returns when which phase began."""
    return [(mark.at_unix_s, mark.code) for mark in marks if mark.kind == kinds.PHASE]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _load(path: Path) -> dict[str, Any]:
    with _named(path):
        plain = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(plain, dict):
            raise TypeError("not an object")
        return plain


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns what a file's content raises into a ValueError with its name."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a file of HangMonitor, or was cut: {error!r}") from None
