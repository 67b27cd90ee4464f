"""What watches a run leaves healthy ones alone: random schedules of slow ranks, with the smallest limits.

With ``COMMOPT_SEEDS=17,18`` other schedules are run, one of them if it has failed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from healthy_fits import LIMIT_S, run_on_rank
from healthy_schedules import draw

from support.ranks import RankError, run_ranks

_AFTER_S, _NUM_TRIES, _MORE_TIME = 0.4, 4, 3
"""A schedule is run again with more time if an alarm may be due to a machine that was too busy for these limits."""
_LATE = 0.25
"""A rank that was late by that part of ``after_s`` may have been over its limit because of it."""

_RAISING = 26
"""Of its schedule, a rank waits for a slow one while another has raised what all will catch."""
_SEEDS = [int(seed) for seed in os.environ.get("COMMOPT_SEEDS", f"0,1,2,3,4,{_RAISING}").split(",")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", _SEEDS)
def test_healthy_fits_are_left_alone(seed: int, tmp_path: Path) -> None:
    """If it fails, what is to guard a run has raised a false alarm, ended it, or changed what it trains."""
    schedule = draw(seed)
    for number in range(_NUM_TRIES):
        after_s, folder, results = _AFTER_S * _MORE_TIME**number, tmp_path / str(number), []
        folder.mkdir()
        alarm = ""
        try:
            results = run_ranks(run_on_rank, schedule, after_s, folder, world_size=schedule.world_size, limit_s=LIMIT_S)
        except RankError as error:
            alarm = str(error)
        alarm += "".join(f"{path} exists" for path in folder.rglob("*report.json"))
        for steps, expected_steps, differing_weights, left in results:
            assert (steps, differing_weights, left) == (expected_steps, [], []), schedule
        late_s = max((float(path.read_text() or 0) for path in folder.glob("late*.txt")), default=0.0)
        if not alarm or late_s < _LATE * after_s:
            break
    assert not alarm, f"{schedule}\n{alarm}"
