import random
import statistics

import pytest

from lightning_commopt.report.intervals import Interval, compare, median_interval
from support.cross_section import sampled
from support.known import known

NOISE = 0.01
NUM_SWEEPS = 100


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([3.0, 1.0, 2.0], (1.0, 3.0)),
        *[([float(value) for value in range(num_values)], (0.0, num_values - 1.0)) for num_values in (2, 3, 4, 5)],
        ([2.0], (None, None)),
        ([1.0, float("nan"), 3.0], (1.0, 3.0)),
    ],
)
def test_up_to_five_values_the_interval_is_their_range(values, ends):
    """If it fails, docs/explanation/statistics.md says something wrong of it."""
    finite = [value for value in values if value == value]
    expected = Interval(median=statistics.median(finite), low=ends[0], high=ends[1], num_values=len(finite))
    assert median_interval(values) == expected


def test_from_six_values_on_the_ends_do_not_count():
    found = known(median_interval([0.0, 10.0, 11.0, 12.0, 13.0, 14.0, 100.0]))
    assert found.median == 12
    assert (found.low or 0) > 0
    assert (found.high or 100) < 100


def test_without_a_number_there_is_none():
    assert median_interval([float("inf")]) is median_interval([]) is None


def test_pairs_are_divided_one_by_one():
    """The machine was half as fast in the second repetition, for both."""
    ratio, difference = compare([110, 56, 112], [100, 50, 100], is_paired=True)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.10, 1.12, 1.12))
    assert difference == "faster"


def test_without_pairs_medians_are_divided_and_the_ends_are_the_farthest_ratios():
    ratio, difference = compare([110, 56, 112], [100, 50, 100], is_paired=False)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((56 / 100, 1.1, 112 / 50))
    assert difference == "no difference"


def test_of_a_single_run_nothing_is_known():
    ratio, difference = compare([200.0], [100.0, 101.0, 102.0], is_paired=False)
    assert ratio == Interval(median=200 / 101, low=None, high=None, num_values=1)
    assert difference == "unknown"


def test_three_pairs_that_agree_by_chance_are_unknown():
    """Each is faster, but by so different amounts that noise may have done it."""
    ratio, difference = compare([100.2, 103, 101], [100, 100, 100], is_paired=True)
    assert ratio.low == pytest.approx(1.002)
    assert difference == "unknown"


def test_two_samples_of_unequal_noise_are_no_difference_that_is_sure():
    """If it fails, five repetitions that agree hide that the two runs of the baseline do not."""
    comparison = compare([1.30, 1.31, 1.29, 1.30, 1.305], [1.05, 1.2], is_paired=False)
    assert known(comparison.ratio.low) > 1
    assert comparison.difference == "unknown"


def test_equal_values_have_no_noise():
    assert compare([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], is_paired=True).difference == "no difference"
    assert compare([1.1, 1.1, 1.1], [1.0, 1.0, 1.0], is_paired=False).difference == "faster"


def _share(num_repetitions: int, speedup: float, *, is_paired: bool) -> dict[str, float]:
    """Returns how often sweeps of two plans come to each verdict, with a machine that drifts by 3 %."""
    source = random.Random(num_repetitions)
    verdicts = []
    for _ in range(NUM_SWEEPS):
        drifts = [source.gauss(1, 0.03 if is_paired else 0) for _ in range(num_repetitions)]
        ours = [speedup * drift * source.gauss(1, NOISE) for drift in drifts]
        theirs = [drift * source.gauss(1, NOISE) for drift in drifts]
        verdicts.append(compare(ours, theirs, is_paired=is_paired).difference)
    return {verdict: verdicts.count(verdict) / NUM_SWEEPS for verdict in ("faster", "slower", "no difference")}


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("num_repetitions", sampled([3, 5, 8], by_default=[3]))
def test_no_difference_is_seldom_called_one(num_repetitions, is_paired):
    """If it fails, a sweep praises plans that bring nothing."""
    share = _share(num_repetitions, 1.0, is_paired=is_paired)
    assert share["faster"] + share["slower"] <= 0.12


@pytest.mark.parametrize("is_paired", [True, False])
def test_a_tenth_is_seen_in_three_repetitions(is_paired):
    assert _share(3, 1.1, is_paired=is_paired)["faster"] >= 0.97
    assert _share(3, 1 / 1.1, is_paired=is_paired)["slower"] >= 0.97


@pytest.mark.parametrize("is_paired", [True, False])
def test_three_per_cent_are_seen_in_eight_repetitions(is_paired):
    assert _share(8, 1.03, is_paired=is_paired)["faster"] >= 0.95
