"""Writes and reads the files of watchers: ``report.json``, and the state and marks of every rank."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from lightning_commopt.measure.plain import from_plain
from lightning_commopt.watch.hangs.diagnosis import Diagnosis, diagnose
from lightning_commopt.watch.hangs.marks import Mark
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_REPORT = "report.json"
_PREVIOUS_REPORT = "previous_report.json"
_RANK_FILE = re.compile(r"rank_(\d+)\.json")


class Records:
    """Writes the files of one rank.

    Files are replaced as a whole. Errors are ignored: the diagnosis has been printed. The folder is made with the first
    file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def begin(self, world_size: int) -> None:
        """Removes the files of an earlier run; its report is kept as ``previous_report.json``."""
        with suppress(OSError):  # there is none, or another rank was faster
            (self._folder / _REPORT).replace(self._folder / _PREVIOUS_REPORT)
        with suppress(OSError):
            for path in self._folder.iterdir():
                found = _RANK_FILE.fullmatch(path.name)
                if found and (int(found[1]) == self._rank or int(found[1]) >= world_size):
                    path.unlink(missing_ok=True)

    def keep(self, snapshot: RankSnapshot, marks: Sequence[Mark]) -> None:
        """Writes a snapshot of the rank, and its last marks with times in seconds since 1970."""
        unix_s = time.time() - time.monotonic()
        plain = snapshot.to_plain() | {
            "written_unix_s": time.time(),
            "marks": [[round(mark.at_s + unix_s, 6), *mark[2:]] for mark in marks],
        }
        self._write(f"rank_{self._rank}.json", plain)

    def discard(self) -> None:
        """Removes the rank's file, after a successful fit."""
        with suppress(OSError):  # other ranks' files are still in the folder
            (self._folder / f"rank_{self._rank}.json").unlink(missing_ok=True)
            self._folder.rmdir()

    def report(self, diagnosis: Diagnosis, snapshots: Sequence[RankSnapshot], idle_s: float, ras: Any = None) -> Path:
        """Writes the diagnosis, the snapshots of all ranks, and the answer of NCCL's RAS; returns the folder."""
        plain = asdict(diagnosis) | {
            "time_unix_s": time.time(),
            "idle_s": idle_s,
            "nccl_ras": ras,
            "snapshots": [each.to_plain() for each in sorted(snapshots, key=attrgetter("rank"))],
        }
        self._write(_REPORT, plain)
        return self._folder

    def _write(self, name: str, plain: dict[str, Any]) -> None:
        path = self._folder / name
        partial = path.with_name(f".{name}.{os.getpid()}")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(plain), encoding="utf-8")
            partial.replace(path)


class TimedMark(NamedTuple):
    """A mark in seconds since 1970, so that ranks of several hosts can be compared."""

    at_unix_s: float
    kind: int
    code: int
    value: int


@dataclass(frozen=True)
class HangReport:
    """The files of a run, for ``commopt doctor DIR``."""

    diagnosis: Diagnosis  # the reported one; otherwise from the last states of the ranks
    was_reported: bool  # whether watchers have reported a hang
    at_unix_s: float  # when it was reported, or when the last rank was seen
    snapshots: list[RankSnapshot]  # of the ranks that have written one
    marks: dict[int, list[TimedMark]]  # of these, by rank, the oldest first


def read_hang_report(folder: Path) -> HangReport:
    """Reads a folder of watchers, or its subfolder ``hangs``.

    Raises:
        FileNotFoundError: there is no file of a watcher.
        ValueError: a file is no JSON, or not from a watcher.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no directory")
    folder = folder / "hangs" if (folder / "hangs").is_dir() else folder
    by_rank: dict[int, RankSnapshot] = {}
    marks: dict[int, list[TimedMark]] = {}
    last_s = 0.0
    for path in sorted(folder.glob("rank_*.json")):
        plain = _load(path)
        with _naming(path):
            snapshot = RankSnapshot.from_plain(plain)
            by_rank[snapshot.rank] = snapshot
            marks[snapshot.rank] = [TimedMark(*mark) for mark in plain["marks"]]
            last_s = max(last_s, plain["written_unix_s"])
    report = folder / _REPORT
    if not by_rank and not report.exists():
        raise FileNotFoundError(
            f"{folder} has no {_REPORT} and no rank_*.json: HangMonitor writes them when a run hangs"
        )
    if not report.exists():
        snapshots = [by_rank[rank] for rank in sorted(by_rank)]
        return HangReport(diagnose(snapshots), False, last_s, snapshots, marks)
    plain = _load(report)
    with _naming(report):
        snapshots = [RankSnapshot.from_plain(each) for each in plain["snapshots"]]
        return HangReport(from_plain(Diagnosis, plain), True, plain["time_unix_s"], snapshots, marks)


def _load(path: Path) -> dict[str, Any]:
    with _naming(path):
        plain = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(plain, dict):
            raise TypeError("not an object")
        return plain


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns errors about a file's content into a ValueError that names the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a file of HangMonitor, or was cut: {error!r}") from None
