"""What a fit may spend, in numbers."""

from __future__ import annotations

import math

import pytest

from lightning_commopt.tune.budget import Budget


def _budget(num_steps: float = 10000, **passed: float) -> Budget:
    return Budget(num_steps=num_steps, max_regret=0.01, measuring_s=0.4, **passed)  # type: ignore[arg-type]


def test_a_search_may_cost_a_share_of_all_steps_minus_what_was_lost() -> None:
    """If it fails, the first search leaves nothing for others, or each has the whole budget."""
    assert _budget().search_steps(is_first=True) == pytest.approx(60)
    assert _budget(lost_steps=5).search_steps(is_first=False) == pytest.approx(65)
    slower = _budget(num_done=2000, base_steps=500)  # 8000 follow
    assert slower.search_steps(is_first=False) == pytest.approx(0.007 * 8500)
    assert _budget(math.inf, num_done=2000, base_steps=500).search_steps(is_first=True) == pytest.approx(3)


def test_measuring_may_cost_a_share_minus_what_earlier_calibrations_took() -> None:
    """If it fails, each calibration of a long fit measures for as long as all of them together may."""
    assert _budget().measuring_limit_s(0.02) == pytest.approx(0.7)
    assert _budget(measured_s=0.5).measuring_limit_s(0.02) == pytest.approx(0.2)
    assert _budget(measured_s=5.0).measuring_limit_s(0.02) == 0


@pytest.mark.parametrize(("lost_steps", "needed_steps"), [(0, 800), (6, 1800), (-6, 800)])
def test_a_calibration_needs_steps_that_pay_for_it_and_for_what_was_lost(lost_steps: float, needed_steps: int) -> None:
    """If it fails, a short fit calibrates in vain, or a fit that has saved time is told that it needs fewer steps."""
    assert _budget(lost_steps=lost_steps).needed_steps == needed_steps
    for num_steps in (needed_steps - 1, needed_steps):
        budget = _budget(num_steps, lost_steps=lost_steps)
        assert budget.allows_calibration(0.001) == (num_steps == needed_steps)


def test_a_fit_of_unknown_length_calibrates_when_it_can_pay_for_all_compressors() -> None:
    """If it fails, it leaves compressors out, which it could measure some hundred steps later."""
    assert not _budget(math.inf, num_done=5600, base_steps=5600).allows_calibration(0.02)
    assert _budget(math.inf, num_done=5800, base_steps=5800).allows_calibration(0.02)


def test_what_has_passed_counts_in_steps_of_the_new_length() -> None:
    budget = _budget(base_steps=1000, lost_steps=8)
    budget.rescale(0.25)
    assert (budget.base_steps, budget.lost_steps) == (250, 2)
