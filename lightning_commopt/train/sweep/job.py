"""One job of a sweep: a single run in its own directory, and its outcome."""

from __future__ import annotations

import codecs
import dataclasses
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lightning_commopt.launch.fork_server import server_for
from lightning_commopt.launch.process import InterruptedRun, run_in_group
from lightning_commopt.measure.runs.files import LOG_FILE, RUN_FILE, SUMMARY_FILE
from lightning_commopt.measure.runs.record import RunRecord, write_json
from lightning_commopt.measure.runs.settings import settings_of
from lightning_commopt.measure.runs.writer import fail_record


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to run.

    Attributes:
        number: of the job in the sweep, from 0; jobs that are left out leave gaps.
        sync_method: short name of how the gradients travel.
        overrides: the job's own, as the sweeper made them, and its repetition.
        command: program and arguments.
        folder: of the run.
        config_yaml: what the run leaves as its configuration, resolved.
        content: of the configuration, what says how to train: jobs for which it is equal train the same.
        is_on_cpu: it may be started from a process that has imported everything; CUDA allows none such.
        note: what the user should know before the job runs.
    """

    number: int
    sync_method: str
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    folder: Path
    config_yaml: str
    content: str
    is_on_cpu: bool = False
    note: str | None = None

    @property
    def log(self) -> Path:
        return self.folder / LOG_FILE


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job and its record.

    Attributes:
        job: that has ended.
        record: of its run.
        is_kept: the run is an earlier one, found in the job's folder.
    """

    job: Job
    record: RunRecord
    is_kept: bool = False


class SweepObserver:
    """Gets the events of a sweep; this base class ignores them."""

    def on_plan(self, folder: Path, num_jobs: int) -> None:
        """The sweep in ``folder`` has ``num_jobs`` jobs so far, those that have ended included."""

    def on_note(self, text: str) -> None:
        """A note for the user."""

    def on_start(self, job: Job) -> None:
        """A job starts."""

    def on_output(self, text: str, is_final: bool) -> None:
        """The job wrote a line; unless ``is_final`` the next one replaces it, as with progress bars."""

    def on_end(self, result: JobResult) -> None:
        """A job has finished or failed, or its earlier run is kept."""


def run_job(job: Job, env: Mapping[str, str], observer: SweepObserver) -> JobResult:
    """Runs a job to its end.

    Args:
        job: what to run; its folder is made.
        env: the whole environment.
        observer: gets the job's output and its end.

    Returns:
        The job with the record that the run wrote; if it wrote none, or did not reach its end, with one that says
        so.

    Raises:
        InterruptedRun: this process got a signal to stop. The job's record says so, and the observer has got it.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / RUN_FILE).unlink(missing_ok=True)
    last_lines: deque[str] = deque(maxlen=500)
    interrupted: InterruptedRun | None = None
    with job.log.open("w", encoding="utf-8", buffering=1) as log:

        def on_line(text: str, is_final: bool) -> None:
            if is_final:
                log.write(text + "\n")
                last_lines.append(text)
            observer.on_output(text, is_final)

        reader = LineReader(on_line)
        server = server_for(job.command) if job.is_on_cpu else None
        try:
            reason = _reason(run_in_group(job.command, env, reader.feed, server=server))
        except InterruptedRun as error:
            interrupted, reason = error, str(error)
        reader.close()
    lines = None if interrupted else list(last_lines)
    result = JobResult(job=job, record=_final_record(job, reason, lines))
    observer.on_end(result)
    if interrupted is not None:
        raise interrupted
    return result


def save_summary(folder: Path, results: Sequence[JobResult], left_out: Sequence[tuple[Job, Job]] = ()) -> None:
    """Writes the outcome of all jobs so far into the sweep's directory.

    Args:
        folder: of the sweep.
        results: of the jobs.
        left_out: jobs that were not run, each with the job that trains the same.
    """
    summary = [
        {
            "number": result.job.number,
            "folder": str(result.job.folder),
            "overrides": result.job.overrides,
            "stands_for": [
                {"number": job.number, "overrides": job.overrides}
                for job, first in left_out
                if first.number == result.job.number
            ],
            "run": dataclasses.asdict(result.record),
        }
        for result in results
    ]
    write_json(folder / SUMMARY_FILE, summary)


def _reason(status: int) -> str | None:
    if status == 0:
        return None
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _final_record(job: Job, reason: str | None, last_lines: list[str] | None) -> RunRecord:
    """Returns the run's own record, or corrects one that is missing, ended too early or does not know the cause.

    Args:
        job: that has ended.
        reason: for which its processes have failed, if they have.
        last_lines: of their output; None if the reason explains it all.
    """
    try:
        record = RunRecord.load(job.folder)
    except (FileNotFoundError, ValueError):
        record = _unfinished_record(job)
    if record.status == "finished" and reason is None:
        return record
    error = reason or "ended without a result"
    if last_lines is not None:
        own = record.error if record.status == "failed" else None
        error = own or _join(last_exception(last_lines), error)
        error = _join(error, cause_in_another_rank(error, last_lines))
    failed = fail_record(job.folder, error, unfinished=record, is_final=True)
    assert failed is not None
    return failed


def _unfinished_record(job: Job) -> RunRecord:
    """Returns a record for a job that has written none."""
    config = yaml.safe_load(job.config_yaml)
    settings, chosen = settings_of(job.folder, config if isinstance(config, dict) else {}, job.overrides)
    return RunRecord(
        status="running", sync_method=job.sync_method, settings=settings, overrides=job.overrides, chosen=chosen
    )


def _join(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)


_ENDS = re.compile(r"([\r\n])")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# How Python ends a traceback; a logger or Lightning may have put something before it.
_EXCEPTION_LINE = re.compile(
    r"^(\[rank(?P<rank>\d+)\]: ?)?(?P<exception>[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?)$"
)
# What a rank says whose peer has gone, or that was stopped for that reason.
_CONSEQUENCE = re.compile(
    r"closed by peer|connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|\bDist\w*Error|SIG(TERM|KILL|ABRT)",
    re.IGNORECASE,
)


class LineReader:
    """Splits output into lines, and separates those that stay from those that are overwritten.

    Args:
        on_line: receives each line without control sequences, and whether it stays. Empty lines that stay are left
            out.
    """

    def __init__(self, on_line: Callable[[str, bool], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._overwritten = ""

    def feed(self, data: bytes) -> None:
        """Takes the next piece of the output, which may end anywhere."""
        for piece in _ENDS.split(self._decoder.decode(data)):
            if piece == "\n":
                self._end_line()
            elif piece == "\r":
                self._overwritten = self._line or self._overwritten
                self._line = ""
            else:
                self._line += piece
        shown = _CONTROL.sub("", self._line or self._overwritten).rstrip()
        if shown:
            self._on_line(shown, False)

    def close(self) -> None:
        self._end_line()

    def _end_line(self) -> None:
        # A carriage return only moves the cursor: what stood there before the end of the line is still to be seen.
        line = _CONTROL.sub("", self._line or self._overwritten).rstrip()
        self._line = self._overwritten = ""
        if line:
            self._on_line(line, True)


def lines_that_stay(output: str) -> list[str]:
    """Returns what is left to be read of a program's whole output, line by line."""
    lines: list[str] = []
    reader = LineReader(lambda text, is_final: lines.append(text) if is_final else None)
    reader.feed(output.encode())
    reader.close()
    return lines


def last_exception(lines: Sequence[str]) -> str | None:
    """Returns the last line with which Python ends a traceback; None without any."""
    return next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), None)


def cause_in_another_rank(error: str, lines: Sequence[str]) -> str | None:
    """Returns the exception of another rank that explains why one has failed.

    Args:
        error: of the rank that has failed.
        lines: of all ranks, mixed.

    Returns:
        The first exception that is no consequence itself, after its rank; None if ``error`` is no lost connection and
        no signal, or nothing explains it.

    >>> cause_in_another_rank("RuntimeError: Connection closed by peer", ["[rank1]: ValueError: no such token"])
    'rank 1: ValueError: no such token'
    """
    if not _CONSEQUENCE.search(error):
        return None
    for found in filter(None, map(_EXCEPTION_LINE.match, lines)):
        exception = found["exception"]
        if exception not in error and not _CONSEQUENCE.search(exception):
            return f"{'another rank' if found['rank'] is None else 'rank ' + found['rank']}: {exception}"
    return None
