"""One job of a sweep: a single run in a directory of its own, and what became of it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_commopt.sweep.output import LineReader
from lightning_commopt.sweep.process import InterruptedRun, run_in_group
from lightning_commopt.run_record import RUN_FILE, RunRecord, write_json

LOG_FILE = "job.log"
SUMMARY_FILE = "sweep.json"

# How Python ends a traceback; a logger or Lightning may have put something before it.
_EXCEPTION_LINE = re.compile(r"^(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt|Exit)\b(: .*)?$")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run.

    Attributes:
        number: counted from 0 in the sweep.
        plan_name: short name of the way the gradients travel.
        overrides: the job's own, as the sweeper made them.
        command: program and arguments.
        folder: of the run.
    """

    number: int
    plan_name: str
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        """File with what the job's processes said."""
        return self.folder / LOG_FILE


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job and its record."""

    job: Job
    record: RunRecord


class SweepObserver:
    """Is told what happens in a sweep; this one ignores it."""

    def started(self, job: Job, num_jobs: int) -> None:
        """A job starts; ``num_jobs`` are known so far."""

    def said(self, text: str, is_final: bool) -> None:
        """The job wrote a line; unless ``is_final`` it will write over it, as progress bars do."""

    def ended(self, result: JobResult) -> None:
        """A job has ended, well or not."""


def run_job(job: Job, env: Mapping[str, str], observer: SweepObserver) -> JobResult:
    """Runs a job to its end.

    Args:
        job: what to run; its folder is made.
        env: the whole environment.
        observer: is told what the job says, and of its end.

    Returns:
        The job with the record that the run wrote; if it wrote none, or did not come to its end, with one that says
        so.

    Raises:
        InterruptedRun: we were told to stop. The job's record says so, and the observer has got it.
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
            observer.said(text, is_final)

        reader = LineReader(on_line)
        try:
            reason = _reason(run_in_group(job.command, env, reader.feed))
        except InterruptedRun as error:
            interrupted, reason = error, str(error)
        reader.close()
    result = JobResult(job=job, record=_final_record(job, reason, list(last_lines)))
    observer.ended(result)
    if interrupted is not None:
        raise interrupted
    return result


def save_summary(folder: Path, results: Sequence[JobResult]) -> None:
    """Writes what became of all jobs so far into the sweep's directory."""
    summary = [
        {
            "number": result.job.number,
            "folder": str(result.job.folder),
            "overrides": result.job.overrides,
            "run": dataclasses.asdict(result.record),
        }
        for result in results
    ]
    write_json(folder / SUMMARY_FILE, summary)


def _reason(status: int) -> str | None:
    if status == 0:
        return None
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _final_record(job: Job, reason: str | None, last_lines: list[str]) -> RunRecord:
    """Returns the run's own record, or corrects one that is missing or ended too early."""
    try:
        record = RunRecord.load(job.folder)
    except FileNotFoundError:
        record = RunRecord(status="running", plan_name=job.plan_name, overrides=job.overrides)
    if record.status == "failed" or (record.status == "finished" and reason is None):
        return record
    said = next((line for line in reversed(last_lines) if _EXCEPTION_LINE.match(line)), None)
    why = "; ".join(part for part in (said, reason or "ended without a result") if part)
    record = dataclasses.replace(record, status="failed", error=why)
    record.save(job.folder)
    return record
