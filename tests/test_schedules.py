"""``benchmarks/schedules.py``: programs end as they must, and the judge lets no other end pass."""

from dataclasses import replace
from pathlib import Path

import pytest
from schedule_job import FAULTS, Schedule, draw
from schedules import allowed_statuses, expected_message

from support.marked_processes import Program

_SCRIPT = str(Path(__file__).parents[1] / "benchmarks" / "schedules.py")
_LIMIT_S = 500
"""Only against waiting for ever."""
_SCHEDULES = [draw(seed) for seed in range(200)]


def test_the_schedules_have_everything() -> None:
    """If it fails, the benchmark leaves out a strategy, a launcher or a fault."""
    assert {schedule.fault for schedule in _SCHEDULES} == {"", *FAULTS}
    assert {schedule.launcher for schedule in _SCHEDULES} == {"forked", "popen", "torchrun"}
    assert {schedule.strategy for schedule in _SCHEDULES} == {"stock ddp", "ddp", "auto", "fsdp2"}
    assert {schedule.num_fits for schedule in _SCHEDULES} == {1, 2}


def _faulty(fault: str, rank: int, launcher: str = "popen") -> Schedule:
    return replace(_SCHEDULES[0], fault=fault, fault_rank=rank, launcher=launcher)


@pytest.mark.parametrize(
    ("schedule", "statuses"),
    [
        (_faulty("", 0), {0}),
        (_faulty("raise in step", 0), {1, -9}),
        (_faulty("raise in step", -1, "torchrun"), {1}),
        (_faulty("exit 3 in step", 0), {3, -9}),
        (_faulty("exit 3 in step", 1), {1, -9}),
        (_faulty("exit 0 before", 0), {0}),
        (_faulty("exit 0 before", 1), {1, -9}),
        (_faulty("raise after", 1), {0, 1, -9}),
    ],
)
def test_a_crash_is_no_allowed_status(schedule: Schedule, statuses: set[int]) -> None:
    """If it fails, a segmentation fault, or a status that hides an error, counts as right."""
    assert allowed_statuses(schedule) == statuses
    assert not schedule.fault or expected_message(schedule)


@pytest.mark.exhaustive
def test_programs_end_as_they_must(tmp_path: Path) -> None:
    """If it fails, a healthy program is disturbed, or a faulty one hides its fault or leaves processes."""
    program = Program([_SCRIPT, "--first", "24", "--num", "4", "--fail"], tmp_path)
    try:
        assert program.wait(_LIMIT_S), f"{program.processes()} are left: {program.output}"
    finally:
        program.kill()
    assert program.process.returncode == 0, program.output
    assert "4 of 4 programs have ended as they must" in program.output
