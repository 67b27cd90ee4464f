"""Jobs of a Hydra multirun, all in one process: one that fails ends by itself, and the next ones run."""

from pathlib import Path

import pytest

from support.marked_processes import Program

_SCRIPT = str(Path(__file__).parent / "sweeping_script.py")
_LIMIT_S = 240
"""Only against waiting for ever: each rank of each job imports everything."""

_CASES = [
    ("ddp", "after the fit", -1, True),
    ("ddp", "after the fit, late", -1, False),
    ("ddp", "before the group", 0, False),
    ("fsdp2", "after the fit", -1, False),
]


def _sweep(folder: Path, *overrides: str) -> Program:
    return Program([_SCRIPT, "-m", "hydra.sweep.dir=sweep", *overrides], folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "fault", "rank", "has_callbacks"),
    _CASES,
)
def test_jobs_after_one_that_raises_run(kind: str, fault: str, rank: int, has_callbacks: bool, tmp_path: Path) -> None:
    """If it fails, one job's error ends a sweep, or leaves processes behind."""
    options = (f"kind={kind}", f"rank={rank}", f"has_callbacks={str(has_callbacks).lower()}")
    program = _sweep(tmp_path, f"fault='{fault} ',' '", *options, "hydra.sweep.subdir=.")
    assert program.finish(_LIMIT_S) == 1, program.output
    assert "ArithmeticError: broken" in program.output
    assert "JOB DONE ' ' in 3 steps" in program.output, program.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "status"), [("after the fit exit 3", 3)])
def test_a_job_that_exits_ends_the_sweep(fault: str, status: int, tmp_path: Path) -> None:
    """If it fails, a sweep that a job ends leaves processes behind, or hides the status."""
    program = _sweep(tmp_path, f"fault='{fault}',' '")
    assert program.finish(_LIMIT_S) == status, program.output
    assert "JOB DONE" not in program.output
