import io
from pathlib import Path

import pytest
from rich.console import Console

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep import display as train_display
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.job import Job, JobResult


def job(number):
    overrides = (f"seed={number}",)
    return Job(
        number=number, sync_method="p", overrides=overrides, command=(), folder=Path("s"), config_yaml="", content=""
    )


def result(number, is_kept=False):
    return JobResult(job=job(number), record=RunRecord(status="finished", sync_method="p"), is_kept=is_kept)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that have passed, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(train_display.time, "monotonic", lambda: now[0])
    return now


def test_time_left_is_that_of_the_jobs_that_ran(clock):
    """If it fails, a continued sweep promises to end hours too early."""
    output = io.StringIO()
    display = SweepDisplay(Console(file=output, width=100))
    display.on_plan(Path("sweep"), 10)
    assert display.sweep_dir == Path("sweep")
    for number in range(4):
        display.on_end(result(number, is_kept=True))
    assert display.remaining_s is None
    for number, seconds in ((4, 3000), (5, 5000)):
        display.on_start(job(number))
        clock[0] += seconds
        display.on_end(result(number))
    assert display.remaining_s == 4 * 4000
    display.on_start(job(6))
    clock[0] += 1000
    assert display.remaining_s == 4 * 4000 - 1000
    clock[0] += 9000
    assert display.remaining_s == 3 * 4000, "a job that takes longer does not eat up the others' time"
    display.on_plan(Path("sweep"), 12)
    assert display.remaining_s == 5 * 4000
    shown = output.getvalue()
    assert "job 3 is not run again: seed=3" in shown
    assert "job 6 (7 of 10): seed=6" in shown
    assert "6/10" in shown
    assert "4:26:40 left" in shown


def test_a_last_job_leaves_no_time(clock):
    display = SweepDisplay(Console(file=io.StringIO()))
    display.on_plan(Path("sweep"), 1)
    display.on_start(job(0))
    clock[0] += 7
    display.on_end(result(0))
    assert display.remaining_s == 0
