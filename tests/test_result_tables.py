import io
from pathlib import Path

from rich.console import Console

from lightning_commopt.result_tables import failures, sweep_table
from lightning_commopt.run_record import RunRecord
from lightning_commopt.sweep.job import Job, JobResult


def result(number, overrides, status="finished", **values):
    job = Job(
        number=number, plan_name="p", overrides=overrides, command=(), folder=Path("s"), config_yaml="", content=""
    )
    record = RunRecord(**{"status": status, "plan_name": "bf16", "world_size": 2, **values})
    return JobResult(job=job, record=record)


def rows(results):
    """Returns the words of each line with numbers of the table."""
    output = io.StringIO()
    Console(file=output, width=160).print(sweep_table(results))
    lines = [line.split() for line in output.getvalue().splitlines()]
    return [line for line in lines if any(word[0].isdigit() for word in line)]


def test_repetitions_share_a_row_with_their_medians():
    results = [
        result(2 * repetition + place, (f"seed={place}", f"repetition={repetition}"), steps_per_s=speed, val_loss=0.5)
        for repetition, speeds in enumerate([(10.0, 1.0), (30.0, 2.0), (20.0, 9.0)])
        for place, speed in enumerate(speeds)
    ]
    assert rows(results) == [
        ["bf16", "0", "3", "2", "20.00", "-", "-", "-", "0.5000"],
        ["bf16", "1", "3", "2", "2.00", "-", "-", "-", "0.5000"],
    ]


def test_medians_are_those_of_the_runs_that_finished():
    results = [
        result(0, ("a=1", "repetition=0"), steps_per_s=10.0),
        result(1, ("a=1", "repetition=1"), status="failed", error="E: x", steps_per_s=1000.0),
        result(2, ("a=1", "repetition=2"), steps_per_s=20.0),
    ]
    assert rows(results) == [["bf16", "3", "2", "15.00", "-", "-", "-", "-", "1", "of", "3", "failed"]]
    assert [text.plain for text in failures(results)] == ["job 1 failed: E: x\n  log: s/job.log"]


def test_without_repetitions_there_is_a_row_for_each_job():
    results = [result(0, ("a=1", "b=2"), steps_per_s=1.0), result(1, ("a=3", "b=2"), status="failed")]
    assert rows(results) == [
        ["bf16", "1", "2", "1.00", "-", "-", "-", "-", "finished"],
        ["bf16", "3", "2", "-", "-", "-", "-", "-", "failed"],
    ]


def test_ranks_are_shown_once():
    results = [result(0, ("ranks=1",), world_size=1), result(1, ("ranks=2",), world_size=2)]
    assert [row[:2] for row in rows(results)] == [["bf16", "1"], ["bf16", "2"]]
    assert [row[2] for row in rows(results)] == ["-", "-"]
    results = [result(0, ("ranks=1",), world_size=1), result(1, ("ranks=2",), status="failed", world_size=None)]
    assert [row[:3] for row in rows(results)] == [["bf16", "1", "1"], ["bf16", "2", "-"]]
