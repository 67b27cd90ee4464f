"""The example of Ray Tune, as its first line says."""

import re
from pathlib import Path

import pytest

from support.marked_processes import Program

pytestmark = pytest.mark.exhaustive
pytest.importorskip("ray", reason="benchmarks/programs.sh installs and runs this")
pytest.importorskip("lightning", reason="the example imports it")

LIMIT_S = 580
"""Only against waiting for ever."""
_ROW = re.compile(r" *(NaN|int8) +(1|25) +([0-9.]+) +([0-9.]+) +([0-9.]+)\n")


def test_finds_the_plan_with_the_least_time(tmp_path: Path) -> None:
    """If it fails, the numbers of CommTimeMonitor do not reach Tune, or a plan does not reach its trial."""
    program = Program([str(Path(__file__).parents[2] / "examples" / "ray_tune.py")], tmp_path)
    assert program.finish(LIMIT_S) == 0, program.output[-5000:]
    rows = _ROW.findall(program.output[program.output.rindex("config/comm_hook") :])
    assert {row[:2] for row in rows} == {("NaN", "1"), ("NaN", "25"), ("int8", "1"), ("int8", "25")}
    assert len(rows) == 4
    step_s = [float(row[2]) for row in rows]
    assert step_s == sorted(step_s)
    assert all(0 < float(row[3]) < 1 and float(row[4]) > 0.7 for row in rows)
    assert len({row[4] for row in rows if row[0] == "NaN"}) == 1
    hook = "None" if rows[0][0] == "NaN" else f"'{rows[0][0]}'"
    assert f"fastest: CommOptDDP(**{{'comm_hook': {hook}, 'bucket_cap_mb': {rows[0][1]}}})\n" in program.output
