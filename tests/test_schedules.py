"""``benchmarks/schedules.py``: programs end as they must."""

from pathlib import Path

import pytest

from support.marked_processes import Program

_SCRIPT = str(Path(__file__).parents[1] / "benchmarks" / "schedules.py")
_LIMIT_S = 500
"""Only against waiting for ever."""


@pytest.mark.exhaustive
def test_programs_end_as_they_must(tmp_path: Path) -> None:
    """If it fails, a healthy program is disturbed, or a faulty one hides its fault or leaves processes."""
    program = Program([_SCRIPT, "--first", "24", "--num", "4", "--fail"], tmp_path)
    assert program.finish(_LIMIT_S) == 0, program.output
    assert "4 of 4 programs have ended as they must" in program.output
