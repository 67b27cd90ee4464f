"""Writes and reads the files of watchers: ``report.json``, and the state and marks of every rank."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_commopt.measure.plain import check_numbers, errors_naming, from_plain, read_object, write_whole
from lightning_commopt.watch.hangs.diagnosis import Diagnosis, diagnose
from lightning_commopt.watch.hangs.marks import PHASE, PHASES, Mark
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
        self.folder = folder
        self._rank = rank

    def begin(self, world_size: int) -> None:
        """Removes the files of an earlier run; its report is kept as ``previous_report.json``."""
        with suppress(OSError):  # there is no report, or another rank was faster
            (self.folder / _REPORT).replace(self.folder / _PREVIOUS_REPORT)
        with suppress(OSError):
            for path in self.folder.iterdir():
                match = _RANK_FILE.fullmatch(path.name)
                if match and (int(match[1]) == self._rank or int(match[1]) >= world_size):
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
            (self.folder / f"rank_{self._rank}.json").unlink(missing_ok=True)
            self.folder.rmdir()

    def report(
        self, diagnosis: Diagnosis, snapshots: Sequence[RankSnapshot], idle_s: float, ras: Any = None
    ) -> OSError | None:
        """Writes the diagnosis, the snapshots of all ranks, and the answer of NCCL's RAS; returns why it could not."""
        plain = asdict(diagnosis) | {
            "time_unix_s": time.time(),
            "idle_s": idle_s,
            "nccl_ras": ras,
            "snapshots": [snapshot.to_plain() for snapshot in sorted(snapshots, key=attrgetter("rank"))],
        }
        return self._write(_REPORT, plain)

    def _write(self, name: str, plain: dict[str, Any]) -> OSError | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, json.dumps(plain))
        except OSError as error:
            return error
        return None


class TimedMark(NamedTuple):
    """A mark in seconds since 1970, so that ranks of several hosts can be compared."""

    at_unix_s: float
    kind: int
    code: int
    value: int


@dataclass(frozen=True)
class HangReport:
    """The files of a run, for ``commopt doctor DIR``."""

    diagnosis: Diagnosis  # the reported one; if that is missing or not whole, one of the last states of the ranks
    was_reported: bool  # whether watchers have reported a hang
    at_unix_s: float  # when it was reported, or when the last rank was seen
    snapshots: list[RankSnapshot]  # the states of the ranks that have written one
    # the marks of these ranks, by rank, the oldest first
    marks: dict[int, list[TimedMark]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # a line for each file that cannot be read, and so is left out


class _RankFile(NamedTuple):
    """The content of a rank's file that is read."""

    snapshot: RankSnapshot
    at_unix_s: float
    marks: list[TimedMark]


def read_hang_report(folder: Path) -> HangReport:
    """Reads a folder of watchers, or its subfolder ``hangs``: the files that are whole.

    Raises:
        FileNotFoundError: there is no file of a watcher.
        ValueError: none of them is whole.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory")
    folder = folder / "hangs" if (folder / "hangs").is_dir() else folder
    problems: list[str] = []
    ranks = [file for path in sorted(folder.glob("rank_*.json")) if (file := _read(path, _rank_file, problems))]
    was_reported = (folder / _REPORT).exists()
    report = _read(folder / _REPORT, _report, problems) if was_reported else None
    if report is None and not ranks:
        if problems:
            raise ValueError("; ".join(problems))
        raise FileNotFoundError(
            f"{folder} has no {_REPORT} and no rank_*.json: HangMonitor writes them when a run hangs"
        )
    if report is None:
        snapshots = sorted((rank.snapshot for rank in ranks), key=attrgetter("rank"))
        report = HangReport(diagnose(snapshots), was_reported, max(rank.at_unix_s for rank in ranks), snapshots)
    return replace(report, marks={rank.snapshot.rank: rank.marks for rank in ranks}, problems=tuple(problems))


def _report(plain: dict[str, Any]) -> HangReport:
    snapshots = [RankSnapshot.from_plain(snapshot) for snapshot in plain["snapshots"]]
    return HangReport(from_plain(Diagnosis, plain), True, plain["time_unix_s"], snapshots)


def _rank_file(plain: dict[str, Any]) -> _RankFile:
    marks = [from_plain(TimedMark, mark) for mark in plain["marks"]]
    if any(mark.kind == PHASE and mark.code not in range(len(PHASES)) for mark in marks):
        raise ValueError("a mark is of no phase")
    return _RankFile(RankSnapshot.from_plain(plain), plain["written_unix_s"], marks)


_Content = TypeVar("_Content", HangReport, _RankFile)


def _read(path: Path, read: Callable[[dict[str, Any]], _Content], problems: list[str]) -> _Content | None:
    """Returns what a file holds; None, with a line more in ``problems``, if it is not whole."""
    try:
        plain = read_object(path, "file of HangMonitor", allow_nan=False)
        with errors_naming(path):
            content = read(plain)
            check_numbers(content.at_unix_s, "at_unix_s")
    except (OSError, ValueError) as error:
        problems.append(str(error))
        return None
    return content
