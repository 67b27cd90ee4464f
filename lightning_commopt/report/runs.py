"""Finds and reads the runs below directories; what cannot be read becomes a warning."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lightning_commopt.measure.files import FOLDER, notices, read_run
from lightning_commopt.measure.plain import check_numbers, from_plain
from lightning_commopt.measure.runs.files import EARLIER_FOLDER, LOSS_FILE, RUN_FILE, SUMMARY_FILE
from lightning_commopt.measure.runs.losses import LossPoint, read_losses
from lightning_commopt.measure.runs.record import RunRecord, Tuning
from lightning_commopt.report.model import Run
from lightning_commopt.text.formatting import list_some

_MAX_DEPTH = 6
# Limit for the files of steps of one run, and of all runs together. Parsing that much takes seconds, and five times as
# much memory.
_MAX_STEPS_BYTES = 200_000_000


def read_runs(folders: Sequence[Path]) -> FoundRuns:
    """Reads all runs in some directories, at any depth down to six; a ValueError if none has finished or failed."""
    found_runs = FoundRuns(_short_names(folders))
    if not found_runs.finished and not found_runs.failed:
        # Pages are shared with others, so they show no whole paths. An error is not shared, so it does.
        with_paths = FoundRuns({folder: str(folder) for folder in folders})
        raise ValueError(f"no run could be read: {'; '.join(with_paths.problems) or 'no directory was given'}")
    return found_runs


class FoundRuns:
    """The finished and failed runs below some directories, in natural order of their names, and problems with them."""

    def __init__(self, shown_names: Mapping[Path, str]) -> None:
        self.finished: list[Run] = []
        self.failed: list[Run] = []
        self._problems: list[str] = []
        self._missing: dict[str, list[str]] = {}
        self._seen: set[Path] = set()
        self._steps_bytes = 0
        for folder, shown in shown_names.items():
            self._read_folder(folder, shown)

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each problem, then one for each kind of missing data, with the names of the runs."""
        return (*self._problems, *(f"{lack}: {list_some(names)}" for lack, names in self._missing.items()))

    def _read_folder(self, folder: Path, shown: str) -> None:
        if not folder.is_dir():
            problem = "is not a directory" if folder.exists() else "does not exist"
            self._problems.append(f"{shown or folder.name} {problem}")
            return
        run_folders = list(_run_folders(folder))
        if not run_folders:
            called = shown or folder.resolve().name
            problem = f"is not a sweep: neither it nor a subdirectory has a {RUN_FILE}"
            self._problems.append(f"{called} {problem}, which commopt-train and RunRecorder write")
        for run_folder in run_folders:
            if run_folder.resolve() in self._seen:  # the user has named a directory, and another one inside it
                continue
            self._seen.add(run_folder.resolve())
            name = (Path(shown) / run_folder.relative_to(folder)).as_posix()
            self._read_run(run_folder, folder, folder.resolve().name if name == "." else name)

    def _read_run(self, folder: Path, root: Path, name: str) -> None:
        try:
            record = RunRecord.load(folder)
            check_numbers(record)
        except (OSError, ValueError) as error:
            self._problems.append(
                f"{name}/{RUN_FILE} cannot be read, so the run is left out: {_in_a_line(error, folder)}"
            )
            return
        if record.status == "running":
            self._note_missing("still running or killed, left out", name)
            return
        run = Run(folder=folder, record=record, name=name)
        if record.status == "failed":
            shown = None if record.error is None else _without_paths(record.error, folder, root)
            self.failed.append(dataclasses.replace(run, record=dataclasses.replace(record, error=shown)))
            return
        losses, has_steps = self._losses(run), self._has_steps(run)
        if run.throughput is None:
            is_short = record.num_timed_steps == 0
            reason = "no steps followed the warm-up" if is_short else "SpeedMonitor was not among the callbacks"
            self._note_missing(f"no throughput, as {reason}", name)
        self.finished.append(dataclasses.replace(run, losses=losses, has_steps=has_steps, tuning=self._tuning(run)))

    def _losses(self, run: Run) -> tuple[LossPoint, ...]:
        try:
            losses = tuple(read_losses(run.folder))
        except (OSError, ValueError) as error:
            self._problems.append(f"{run.name}/{LOSS_FILE} cannot be read: {_in_a_line(error, run.folder)}")
            return ()
        if not losses:
            self._note_missing(f"no loss curve, as there is no {LOSS_FILE}", run.name)
        return losses

    def _tuning(self, run: Run) -> Tuning | None:
        try:
            tuning = from_plain(Tuning, run.record.tuning) if run.record.tuning else None
            check_numbers(tuning)
            return tuning
        except (TypeError, ValueError) as error:
            self._problems.append(f"{run.name}/{RUN_FILE}: the results of plan='auto' cannot be read ({error})")
            return None

    def _has_steps(self, run: Run) -> bool:
        """Checks the steps of all ranks, unless they are too many."""
        try:
            sizes = [path.stat().st_size for path in (run.folder / FOLDER).glob("*.jsonl")]
            if not sizes:
                self._note_missing(f"no timeline, as CommTimeMonitor has saved no steps in {FOLDER}", run.name)
                return False
            if sum(sizes) > _MAX_STEPS_BYTES:
                most = f"{_MAX_STEPS_BYTES / 1e6:.0f} MB"
                self._note_missing(f"no timeline, as there are more than {most} of steps in {FOLDER}", run.name)
                return False
            self._steps_bytes += sum(sizes)
            if self._steps_bytes > _MAX_STEPS_BYTES:
                self._note_missing(f"steps in {FOLDER} not checked for broken lines, as there are many", run.name)
                return True
            lines = notices(read_run(run.folder))
        except (OSError, ValueError) as error:
            self._problems.append(f"{run.name}/{FOLDER} cannot be read: {_in_a_line(error, run.folder)}")
            return False
        self._problems += [f"{run.name}: {_relative(line, run.folder)}" for line in lines]
        return True

    def _note_missing(self, lack: str, run_name: str) -> None:
        self._missing.setdefault(lack, []).append(run_name)


def _short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns the shortest unique end of each directory's path; empty for a single directory."""
    parts = {folder: folder.resolve().parts for folder in folders}
    if len(parts) == 1:
        return dict.fromkeys(parts, "")
    names = {}
    for folder, own in parts.items():
        others = [other for other in parts.values() if other != own]
        lengths = range(1, len(own))
        length = next((n for n in lengths if all(other[-n:] != own[-n:] for other in others)), len(own))
        names[folder] = "/".join(own[-length:])
    return names


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yields the directories with a record, nearest first, and none below them."""
    for path, subfolders, files in os.walk(folder):
        depth = len(Path(path).relative_to(folder).parts)
        if RUN_FILE in files:
            yield Path(path)
        is_end = RUN_FILE in files or depth >= _MAX_DEPTH
        visible = [] if is_end else [name for name in subfolders if not name.startswith(".")]
        set_aside = EARLIER_FOLDER if SUMMARY_FILE in files else None
        subfolders[:] = sorted((name for name in visible if name != set_aside), key=_natural)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a key that sorts "2" before "10"."""
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts if part]


def _in_a_line(error: Exception, folder: Path) -> str:
    return _relative(" ".join(str(error).split()), folder) or type(error).__name__


def _relative(text: str, folder: Path) -> str:
    """Returns text without the path of a run's directory, as the line begins with the run's name."""
    return text.replace(f"{folder}{os.sep}", "")


def _without_paths(text: str, folder: Path, root: Path) -> str:
    """Returns text without private paths, as pages are shared."""
    paths = {str(path) for known in (folder, root, Path.home()) for path in (known.absolute(), known.resolve())}
    for path in sorted(paths - {os.sep}, key=len, reverse=True):
        text = text.replace(path, "…")
    return text
