"""How far medians of a few repetitions can be trusted; numpy and scipy are imported when a question needs them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from lightning_commopt.report.model import Difference, Interval

CONFIDENCE = 0.95
_NUM_RESAMPLES = 9999
_ROUNDING = 1e-12

MIN_VALUES_OF_AN_INTERVAL = 6
"""With fewer values the percentile interval of a median is their range, and covers less than it should."""


class Comparison(NamedTuple):
    """The comparison of two samples.

    Attributes:
        ratio: of the medians, or the median of the ratios of pairs.
        difference: whether the ratio is 1, beyond noise.
    """

    ratio: Interval
    difference: Difference


def median_interval(values: Sequence[float]) -> Interval | None:
    """Returns the median and its bootstrap interval.

    Args:
        values: one for each repetition; those that are not finite are left out.

    Returns:
        The percentile interval of 95 %, always the same for the same values. None without a value; without ends for a
        single one. For two to five values it is their range.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    if len(finite) == 1:
        return Interval(median=finite[0], low=None, high=None, num_values=1)
    low, high = _interval_of_median(finite)
    return Interval(median=statistics.median(finite), low=low, high=high, num_values=len(finite))


def compare(values: Sequence[float], baseline: Sequence[float], *, is_paired: bool) -> Comparison:
    """Compares two samples of positive numbers, such as throughputs.

    With fewer than six values the interval is no wider than their range, and two equal settings of three pairs would
    be called different in a quarter of all cases. There, a t-test of the logarithms at 5 % must agree that there is a
    difference, else it is unknown.

    Args:
        values: one for each repetition.
        baseline: the same of what it is compared with.
        is_paired: the two of a place were measured in the same repetition, and share what the machine did then.

    Returns:
        The ratio of ``values`` over ``baseline``, and whether it differs from 1; "no difference" if 1 is in the
        interval, "unknown" with a single value or if the two tests disagree.

    Raises:
        ValueError: a sample is empty, a value is not positive, or pairs are not of one length.
    """
    ours, theirs = list(map(float, values)), list(map(float, baseline))
    if not ours or not theirs or not all(value > 0 for value in (*ours, *theirs)):
        raise ValueError(f"samples must be of positive numbers, got {list(values)} and {list(baseline)}")
    if is_paired and len(ours) != len(theirs):
        raise ValueError(f"pairs must be of one length, got {len(ours)} and {len(theirs)}")
    num_values = min(len(ours), len(theirs))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)] if is_paired else []
    median = statistics.median(ratios) if is_paired else statistics.median(ours) / statistics.median(theirs)
    if num_values == 1:
        return Comparison(Interval(median=median, low=None, high=None, num_values=1), "unknown")
    low, high = _interval_of_median(ratios) if is_paired else _bootstrap((ours, theirs), _ratio_of_medians)
    ratio = Interval(median=median, low=low, high=high, num_values=num_values)
    if low <= 1 <= high:
        return Comparison(ratio, "no difference")
    if num_values < MIN_VALUES_OF_AN_INTERVAL and not _t_test_sees_a_difference(ours, theirs, is_paired):
        return Comparison(ratio, "unknown")
    return Comparison(ratio, "faster" if median > 1 else "slower")


def _interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Returns the bootstrap interval of a median; that of few values is their range, without drawing any."""
    if len(values) < MIN_VALUES_OF_AN_INTERVAL:
        return min(values), max(values)
    return _bootstrap((values,), lambda draws, axis=-1: _numpy().median(draws, axis=axis))


def _bootstrap(samples: tuple[Sequence[float], ...], statistic: Callable[..., Any]) -> tuple[float, float]:
    import scipy.stats

    result = scipy.stats.bootstrap(
        tuple(map(_numpy().array, samples)),
        statistic,
        vectorized=True,
        n_resamples=_NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=_numpy().random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _ratio_of_medians(ours: Any, theirs: Any, axis: int = -1) -> Any:
    return _numpy().median(ours, axis=axis) / _numpy().median(theirs, axis=axis)


def _t_test_sees_a_difference(ours: Sequence[float], theirs: Sequence[float], is_paired: bool) -> bool:
    """Student's test for pairs, Welch's for two samples, of the logarithms."""
    import scipy.stats

    samples = [[math.log(value) for value in sample] for sample in (ours, theirs)]
    if is_paired:
        samples = [[a - b for a, b in zip(*samples, strict=True)]]
    if all(max(sample) - min(sample) < _ROUNDING for sample in samples):  # no noise at all
        means = [statistics.fmean(sample) for sample in samples]
        return abs(means[0] - (means[1] if len(means) > 1 else 0)) >= _ROUNDING
    test = scipy.stats.ttest_1samp(samples[0], 0) if is_paired else scipy.stats.ttest_ind(*samples, equal_var=False)
    return bool(test.pvalue < 1 - CONFIDENCE)


def _numpy() -> ModuleType:
    import numpy

    return numpy
