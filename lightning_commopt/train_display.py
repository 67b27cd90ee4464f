"""What commopt-train shows in the terminal: a bar over the jobs of a sweep, and tables of results."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lightning_commopt.sweep.job import Job, JobResult, SweepObserver
from lightning_commopt.run_record import RunRecord

_BYTES_IN_MB = 1e6


class SweepDisplay(SweepObserver):
    """Shows what the running job says above a bar over all jobs; a context manager.

    Attributes:
        results: of the jobs that have ended.
    """

    def __init__(self, console: Console) -> None:
        self.results: list[JobResult] = []
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("jobs", total=None)
        self._line = Text()
        self._live = Live(self._picture(), console=console, refresh_per_second=4, redirect_stdout=False, transient=True)

    def __enter__(self) -> SweepDisplay:
        """Returns itself; the bar appears with the first job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Takes the bar away."""
        self._live.stop()

    def started(self, job: Job, num_jobs: int) -> None:
        """Names the job and moves the bar."""
        self._bar.update(self._task, total=num_jobs, completed=job.number)
        if self._console.is_terminal and not self._live.is_started:
            self._live.start()
        title = f"job {job.number + 1} of {num_jobs}: {' '.join(job.overrides) or 'no overrides'}"
        self._console.rule(Text(title), align="left")

    def said(self, text: str, is_final: bool) -> None:
        """Prints a line that stays; shows another one above the bar."""
        self._line = Text("" if is_final else text, no_wrap=True, overflow="ellipsis")
        if is_final:
            self._console.print(Text(text), soft_wrap=not self._console.is_terminal)
        self._live.update(self._picture())

    def ended(self, result: JobResult) -> None:
        """Moves the bar, and keeps the result."""
        self.results.append(result)
        self._line = Text()
        self._bar.update(self._task, completed=result.job.number + 1)
        self._live.update(self._picture())
        if not self._console.is_terminal:
            self._console.print(self._bar)

    def _picture(self) -> Group:
        return Group(self._line, self._bar) if self._line.plain else Group(self._bar)


def sweep_table(results: Sequence[JobResult]) -> Table:
    """Returns one row for each job, with a column for every setting in which the jobs differ."""
    settings = [dict(_split(override) for override in result.job.overrides) for result in results]
    names = dict.fromkeys(name for setting in settings for name in setting)
    varying = [name for name in names if len({setting.get(name) for setting in settings}) > 1]
    shown = [name for name in varying if name not in ("strategy", "strategy/comm_hook")]
    has_failed = any(result.record.status != "finished" for result in results)
    table = _table("plan", *(name.rpartition(".")[2] for name in shown), has_status=has_failed)
    for result, setting in zip(results, settings, strict=True):
        cells = _cells(result.record, [setting.get(name, "") for name in shown])
        is_finished = result.record.status == "finished"
        table.add_row(*cells, *([result.record.status] if has_failed else []), style=None if is_finished else "red")
    return table


def run_table(record: RunRecord) -> Table:
    """Returns the result of a single run."""
    table = _table("plan", has_status=False)
    table.add_row(*_cells(record, []))
    return table


def failures(results: Sequence[JobResult]) -> list[Text]:
    """Returns for each failed job the reason, and where the output is."""
    return [
        Text(f"job {result.job.number} failed: {result.record.error}\n  log: {result.job.log}", style="red")
        for result in results
        if result.record.status != "finished"
    ]


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.partition("=")
    return name.lstrip("+~"), value


def _table(*first: str, has_status: bool) -> Table:
    table = Table(*first, box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("ranks", "steps/s", "samples/s", "MB on the wire\nper step", "exposed", "final\nvalidation loss")
    for column in columns:
        table.add_column(column, justify="right")
    if has_status:
        table.add_column("status")
    for column_shown in table.columns:
        column_shown.overflow = "fold"  # a number must not lose digits in a narrow terminal
    return table


def _cells(record: RunRecord, settings: Sequence[str]) -> list[str]:
    wire_mb = None if record.wire_bytes_per_step is None else record.wire_bytes_per_step / _BYTES_IN_MB
    return [
        record.plan_name,
        *settings,
        str(record.world_size or "-"),
        _number(record.steps_per_s, 2),
        _number(record.samples_per_s, 1),
        _number(wire_mb, 3),
        "-" if record.exposed_share is None else f"{100 * record.exposed_share:.1f} %",
        _number(record.val_loss, 4),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
