"""Runs one job of a sweep, a single run in its own directory, and determines its outcome."""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from lightning_commopt.launch.process import InterruptedRun, run_in_group
from lightning_commopt.measure.plain import write_json
from lightning_commopt.measure.runs.files import LOG_FILE, RUN_FILE, SUMMARY_FILE
from lightning_commopt.measure.runs.record import RunRecord, fail_record
from lightning_commopt.measure.runs.settings import settings_of
from lightning_commopt.watch.hangs.process import signal_name

if TYPE_CHECKING:
    from lightning_commopt.train.sweep.display import SweepDisplay


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to run."""

    number: int  # number in the sweep, counted from 0; skipped jobs leave gaps
    sync_method: str  # see `RunRecord`
    overrides: tuple[str, ...]  # the job's own, from the sweeper, and its repetition
    command: tuple[str, ...]  # program and arguments
    folder: Path  # the run's folder
    config_yaml: str  # the run's resolved configuration
    content: str  # the part of the configuration that affects training: jobs with equal content train the same
    note: str | None = None  # a note to the user, shown before the job runs

    @property
    def log(self) -> Path:
        return self.folder / LOG_FILE


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job that has ended, and the record of its run. With ``is_kept`` an earlier run in its folder was kept."""

    job: Job
    record: RunRecord
    is_kept: bool = False


def run_job(job: Job, env: Mapping[str, str], display: SweepDisplay) -> JobResult:
    """Runs a job to its end in ``env``, the whole environment; its folder is created.

    Returns:
        The job with the record that the run wrote. If it is missing or unfinished, the record has the reason.

    Raises:
        InterruptedRun: this process received a signal to stop, which is in the job's record and was displayed.
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
            display.on_output(text, is_final)

        reader = LineReader(on_line)
        try:
            reason = _reason(run_in_group(job.command, env, reader.feed))
        except InterruptedRun as error:
            interrupted, reason = error, str(error)
        reader.close()
    lines = None if interrupted else list(last_lines)
    result = JobResult(job=job, record=_final_record(job, reason, lines))
    display.on_end(result)
    if interrupted is not None:
        raise interrupted
    return result


def save_summary(folder: Path, results: Sequence[JobResult], left_out: Sequence[tuple[Job, Job]] = ()) -> None:
    """Writes the outcome of all jobs so far. A skipped job is listed under the job that trains the same."""
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
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"


def _final_record(job: Job, reason: str | None, last_lines: list[str] | None) -> RunRecord:
    """Returns the run's own record, corrected if it is missing, unfinished or lacks the cause.

    ``reason`` is why its processes failed, None if they did not. ``last_lines`` are the last lines of their output,
    None if the reason is complete without them.
    """
    try:
        record = RunRecord.load(job.folder)
    except (FileNotFoundError, ValueError):
        config: Any = OmegaConf.to_container(OmegaConf.create(job.config_yaml))
        settings = settings_of(job.folder, config if isinstance(config, dict) else {}, job.overrides)
        record = RunRecord(status="running", sync_method=job.sync_method, settings=settings)
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


def _join(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)


_ENDS = re.compile(r"([\r\n])")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# How Python ends a traceback; a logger or Lightning may have put something before it.
_EXCEPTION_LINE = re.compile(
    r"^(\[rank(?P<rank>\d+)\]: ?)?(?P<exception>[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?)$"
)
# Errors of a rank that lost another rank, or that was stopped because another rank failed.
_CONSEQUENCE = re.compile(
    r"closed by peer|connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|\bDist\w*Error|SIG(TERM|KILL|ABRT)",
    re.IGNORECASE,
)


class LineReader:
    """Splits output into final lines and those that are overwritten.

    ``on_line`` gets each line without control sequences, and whether it is final; no empty final lines.
    """

    def __init__(self, on_line: Callable[[str, bool], None]) -> None:
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._overwritten = ""

    def feed(self, data: bytes) -> None:
        """Adds a piece of the output, which may end anywhere."""
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
        # A carriage return only moves the cursor: a line before it remains visible.
        line = _CONTROL.sub("", self._line or self._overwritten).rstrip()
        self._line = self._overwritten = ""
        if line:
            self._on_line(line, True)


def final_lines(output: str) -> list[str]:
    """Returns the final lines of a program's whole output."""
    lines: list[str] = []
    reader = LineReader(lambda text, is_final: lines.append(text) if is_final else None)
    reader.feed(output.encode())
    reader.close()
    return lines


def last_exception(lines: Sequence[str]) -> str | None:
    """Returns the last line that ends a traceback; None without one."""
    return next((line for line in reversed(lines) if _EXCEPTION_LINE.match(line)), None)


def cause_in_another_rank(error: str, lines: Sequence[str]) -> str | None:
    """Returns the exception of another rank, in the mixed output of all, that caused the error of one.

    It is the first exception that is not itself a consequence, with its rank in front. None if ``error`` is neither a
    lost connection nor a signal, or if no exception explains it.

    >>> cause_in_another_rank("RuntimeError: Connection closed by peer", ["[rank1]: ValueError: no such token"])
    'rank 1: ValueError: no such token'
    """
    if not _CONSEQUENCE.search(error):
        return None
    for match in filter(None, map(_EXCEPTION_LINE.match, lines)):
        exception = match["exception"]
        if exception not in error and not _CONSEQUENCE.search(exception):
            return f"{'another rank' if match['rank'] is None else 'rank ' + match['rank']}: {exception}"
    return None
