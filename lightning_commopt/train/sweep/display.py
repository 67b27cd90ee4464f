"""The display of a running sweep: the job's output above a progress bar over all jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from lightning_commopt.text.terminal import print_heading
from lightning_commopt.text.validation import did_you_mean
from lightning_commopt.train.sweep.job import Job, JobResult


class SweepDisplay:
    """Shows the running job's output above a progress bar over all jobs; a context manager.

    Attributes:
        results: results of the jobs that have ended, in this order.
        sweep_dir: the directory of the sweep, once it is known.
    """

    def __init__(self, console: Console) -> None:
        self.results: list[JobResult] = []
        self.sweep_dir: Path | None = None
        self._console = console
        self._num_jobs = 0
        self._seconds_of_jobs: list[float] = []
        self._started_at = 0.0
        self._bar = _Bar(
            *("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _Remaining(self)),
            console=console,
            refresh_per_second=4,
            redirect_stdout=False,
            transient=True,
        )
        self._task = self._bar.add_task("jobs", total=None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds for the remaining jobs, if they take as long as earlier ones on average; None before the first."""
        if not self._seconds_of_jobs:
            return None
        mean_s = sum(self._seconds_of_jobs) / len(self._seconds_of_jobs)
        num_left = self._num_jobs - len(self.results)
        in_this_job = min(mean_s, time.monotonic() - self._started_at) if num_left else 0.0
        return mean_s * num_left - in_this_job

    def __enter__(self) -> SweepDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.live.stop()

    def on_plan(self, folder: Path, num_jobs: int) -> None:
        """Takes the directory of the sweep and the number of its jobs so far, with those that have ended."""
        self.sweep_dir = folder
        self._num_jobs = num_jobs
        self._bar.update(self._task, total=num_jobs)

    def on_note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def on_start(self, job: Job) -> None:
        self._started_at = time.monotonic()
        if self._console.is_terminal and not self._bar.live.is_started:
            self._bar.start()
        title = f"job {job.number} ({len(self.results) + 1} of {self._num_jobs}): {_overrides_text(job)}"
        print_heading(title, self._console)

    def on_output(self, text: str, is_final: bool) -> None:
        """Prints a final line of the job; shows another one, which the next one replaces, above the bar."""
        self._bar.line = Text("" if is_final else text, no_wrap=True, overflow="ellipsis")
        if is_final:
            self._console.print(Text(text), soft_wrap=not self._console.is_terminal)

    def on_end(self, result: JobResult) -> None:
        """Counts a job that has finished or failed, or whose earlier run is kept."""
        if result.is_kept:
            self._console.print(
                Text(f"job {result.job.number} is not run again: {_overrides_text(result.job)}"), soft_wrap=True
            )
        else:
            self._seconds_of_jobs.append(time.monotonic() - self._started_at)
            self._started_at = time.monotonic()
        self.results.append(result)
        self._bar.line = Text()
        self._bar.update(self._task, completed=len(self.results))
        if not self._console.is_terminal and not result.is_kept:
            self._console.print(self._bar)


class _Bar(Progress):
    """The bar, below a line that the running job may still overwrite."""

    line = Text()

    def get_renderables(self) -> Iterable[RenderableType]:
        return (*([self.line] if self.line else []), *super().get_renderables())


class _Remaining(ProgressColumn):
    """Remaining time; rich's own column counts kept jobs as fast ones, and needs two jobs."""

    def __init__(self, display: SweepDisplay) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        seconds = self._display.remaining_s
        if seconds is None:
            return Text("-:--:-- left", style="progress.remaining")
        return Text(f"{timedelta(seconds=round(seconds))} left", style="progress.remaining")


def _overrides_text(job: Job) -> str:
    return " ".join(job.overrides) or "no overrides"


def hint(error: BaseException | None, folder: Path) -> str | None:
    """Returns a hint at a misspelled name for an error of Hydra; None for other errors.

    The hint is a line such as "experiment=quickstat: did you mean 'quickstart'?". If no name is similar, it lists the
    names that exist, or is None where Hydra lists them. ``folder`` is the folder of the configuration, whose subfolders
    are the groups.
    """
    names: list[str] = []
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        requested, known = f"{group}={name}" if group else name, list(error.options or ())
    else:
        cause = error.__cause__ if error is not None else None
        if not isinstance(cause, OmegaConfBaseException) or not isinstance(cause.parent_node, DictConfig):
            return None
        requested = cause.full_key or ""
        prefix, _, name = requested.rpartition(".")
        groups = [] if prefix else [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
        names = [key for key in map(str, cause.parent_node) if not key.startswith("_")]
        known = [*names, *groups]
    question = did_you_mean(name, known) or (names and f"there are {', '.join(names)}")
    return f"{requested}: {question.removeprefix('; ')}" if question else None
