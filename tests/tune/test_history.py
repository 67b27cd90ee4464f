"""What a fit remembers of its steps: each with its plan, and not more than a file should have."""

import math

from lightning_commopt.measure.runs.record import Stretch
from lightning_commopt.tune.verdict import History


def test_steps_in_a_row_with_one_plan_are_one_stretch() -> None:
    history = History()
    history.add("a", [1.0, math.nan], is_timed=True)
    history.add("a", [2.0], is_timed=True)
    history.add("b", [3.0, 1 / 3], is_timed=True)
    history.add("b", [2.0, math.nan, 4.0], is_timed=False)
    history.add("b", [6.0, 6.0, 6.0], is_timed=False)
    history.add("b", [math.nan, math.nan], is_timed=False)
    assert history.stretches == [
        Stretch(plan="a", first_step=0, num_steps=3, seconds=[1.0, None, 2.0]),
        Stretch(plan="b", first_step=3, num_steps=2, seconds=[3.0, 0.333333]),
        Stretch(plan="b", first_step=5, num_steps=6, seconds=[3.0, 6.0]),
        Stretch(plan="b", first_step=11, num_steps=2, seconds=[None]),
    ]
    assert [stretch.steps_per_number for stretch in history.stretches] == [1, 1, 3, 2]


def test_a_long_fit_keeps_its_first_steps() -> None:
    """If it fails, run.json of a fit of a million steps has a line for each look at them."""
    history = History()
    history.add("a", [1.0] * 5, is_timed=True)
    for _ in range(2000):
        history.add("a", [1.0] * 100, is_timed=False)
    searched, watched = history.stretches
    assert searched.num_steps == 5
    assert watched.first_step == 5
    assert len(searched.seconds) + len(watched.seconds) == 1000
    assert watched.num_steps == 99_500
