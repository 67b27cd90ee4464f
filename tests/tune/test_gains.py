"""Gains with their intervals, and looks at one plan, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lightning_commopt.tune.gains import Drift, Gain, Look, TimedVisit, gains


def _gain(base: Sequence[float], other: Sequence[float], steps: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> Gain:
    """Compares a plan with the user's before and after it; all are logarithms of times, ``steps`` within a visit."""
    logs = [log for pair in zip(base, [*other, 0.0], strict=True) for log in pair][:-1]
    visits = [
        TimedVisit(at % 2, 6.0 * at, tuple(math.exp(log + step) for step in steps)) for at, log in enumerate(logs)
    ]
    return gains([visits])[1]


def _variance(gain: Gain) -> float:
    """Returns the variance of a visit that makes the interval of a plan with two visits between three of the user's."""
    errors = [math.log((1 - gain.low) / (1 - gain.gain)), math.log((1 - gain.gain) / (1 - gain.high))]
    assert errors[0] == pytest.approx(errors[1])
    # Of the user's visits, the outer ones count a quarter each.
    return (errors[0] / 3.5) ** 2 / (1 / 2 + 1 / 4**2 + 1 / 2**2 + 1 / 4**2)


def test_the_time_of_the_users_plan_is_interpolated() -> None:
    """If it fails, a load that grows during a search favors the plans that are visited first."""
    assert _gain([0.0, 0.2, 0.4], [0.0, 0.2]).gain == pytest.approx(1 - math.exp(-0.1))


@pytest.mark.parametrize(
    ("base", "other", "steps", "variance"),
    [
        # Nothing varies: half a visit of 3 %, beside two differences of the user's plan, and one of the other.
        ([0.0, 0.0, 0.0], [0.1, 0.1], [0.0] * 4, 0.5 * 0.03**2 / 3.5),
        # The user's plan differs by 0.1 twice; the other differs from it by 0.05 and 0.01.
        ([0.0, 0.1, 0.0], [0.0, 0.04], [0.0] * 4, (0.5 * 0.03**2 + 0.1**2 + 2 * 0.02**2 / 1.5) / 3.5),
        # Steps within visits: the median of absolute distances is 0.05 of four steps, and 0.1 of three and of two.
        ([0.0, 0.0, 0.0], [0.1, 0.1], [-0.1, 0.0, 0.0, 0.1], (1.2533 * 1.4826 * 0.05) ** 2 / 4),
        ([0.0, 0.0, 0.0], [0.1, 0.1], [-0.1, 0.0, 0.1], (1.2533 * 1.3820 * 0.1) ** 2 / 3),
        ([0.0, 0.0, 0.0], [0.1, 0.1], [-0.1, 0.1], (1.2533 * 1.7725 * 0.1) ** 2 / 2),
        # A little more noise between visits than within: four visits' weight is within.
        (
            [0.0, 0.084, 0.0],
            [0.042, 0.042],
            [-0.1, 0.0, 0.0, 0.1],
            (4 * (1.2533 * 1.4826 * 0.05) ** 2 / 4 + 0.084**2) / 7,
        ),
    ],
)
def test_an_interval_has_the_noise_between_visits_and_within(
    base: list[float], other: list[float], steps: list[float], variance: float
) -> None:
    """If it fails, chance chooses plans, or a search never finds a plan that is faster."""
    assert _variance(_gain(base, other, steps)) == pytest.approx(variance)


def test_visits_of_one_step_tell_nothing_about_noise_within() -> None:
    """If it fails, candidates that were given up after a step make the noise look small."""
    base = [TimedVisit(0, at, (math.exp(-0.1), math.exp(0.1))) for at in (0.0, 50.0)]
    others = [TimedVisit(1, at, (1.0,)) for at in (10.0, 20.0, 30.0, 40.0)]
    gain = gains([[base[0], *others, base[1]]])[1]
    error = 3.5 * 1.2533 * 1.4826 * 0.1 * math.sqrt(1 / 4 + 1 / 2)
    assert math.log((1 - gain.low) / (1 - gain.gain)) == pytest.approx(error)


def test_steps_of_any_length_can_be_compared() -> None:
    """If it fails, a step that hangs for a day ends the fit with an OverflowError."""
    gain = gains([[TimedVisit(0, 0.0, (1e-6,)), TimedVisit(1, 5.0, (1e-6,)), TimedVisit(0, 10.0, (86400.0,))]])[1]
    assert math.isfinite(gain.low)


def test_a_look_ignores_one_disturbed_block_and_steps_that_do_not_count() -> None:
    """If it fails, a pause of a second counts as a change of the link."""
    assert Look.of([math.nan, 1.0, 1.0, 1.0, 1.0]) is None
    assert Look.of([1.0] * 5) == (1.0, 0.0)
    seconds = [0.9, 1.1, 1.9, 2.1, 1.8, 2.2, math.nan, 2.1, 1.9, 80.0, 80.0]  # means of 1, 2, 2, 2, and 80
    look = Look.of(seconds)
    assert look is not None
    assert look == pytest.approx((2.0, 0.0), abs=1e-9)
    wide = Look.of([math.exp(log) for log in (0.0, 0.1, 0.2, 0.3, 0.4)])
    assert wide == pytest.approx((math.exp(0.2), 1.4826 * 0.1 / math.sqrt(5)))


@pytest.mark.parametrize(
    ("looks", "num_shifted"),
    [
        ([1.0, 1.1], 0),
        ([1.0, 1.2], 1),
        ([1.0, 0.8], 1),
        ([1.0, 1.2, 1.2], 2),
        ([1.0, 1.2, 1.0, 1.2], 1),
    ],
)
def test_a_drift_is_a_shift_of_looks_in_a_row(looks: list[float], num_shifted: int) -> None:
    """If it fails, one disturbed look begins a search, or a link that has become faster begins none."""
    drift, noisy = Drift(), Drift()
    for step_s in looks:
        drift.add(Look(step_s, 0.0))
        noisy.add(Look(step_s, 0.05))  # five times as much is more than any of these shifts
    assert drift.num_shifted == num_shifted
    assert (drift.reference_s, drift.step_s) == (looks[0], looks[-1])
    assert noisy.num_shifted == 0
