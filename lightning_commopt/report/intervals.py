"""Medians of a few repetitions with their intervals, compared and in words, with no more digits than noise allows.

numpy and scipy are imported only when needed, as importing them takes time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_commopt.measure.median import CONFIDENCE, median_of
from lightning_commopt.text.formatting import number

_NUM_RESAMPLES = 9999
ROUNDING = 1e-12  # logarithms that differ by less differ only by rounding
_TIMES_FROM = 2.0  # larger ratios are shown as "2.3 times as fast", smaller ones as "65 % faster"

TIMES = "\N{MULTIPLICATION SIGN}"
# Probability with which a test reports a difference that does not exist.
ERROR_RATE = 1 - CONFIDENCE
MIN_VALUES_OF_AN_INTERVAL = 6  # the range of fewer values covers the median with less than 95 % probability

# How a throughput differs from the baseline's; unknown with a single run, or with too few to separate it from noise.
Difference = Literal["faster", "slower", "no difference", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a number over repetitions, and its 95 % interval, which is the range of less than six values.

    The ends are None with a single value, and for the base of ratios.
    """

    median: float
    low: float | None
    high: float | None
    num_values: int

    def scaled(self, factor: float) -> Interval:
        """Returns the interval of the number times a positive factor."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Interval(median=self.median * factor, low=low, high=high, num_values=self.num_values)


class Comparison(NamedTuple):
    """The ratio of two medians, or the median of the ratios of pairs; and whether it differs from 1 beyond noise."""

    ratio: Interval
    difference: Difference


def median_interval(values: Iterable[float | None]) -> Interval | None:
    """Returns the median over repetitions and its interval, see `median_of`; a single value has no ends.

    Values that are None or not finite are left out; without any other the result is None.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    if len(finite) == 1:
        return Interval(median=finite[0], low=None, high=None, num_values=1)
    median, low, high = median_of(finite)
    return Interval(median=median, low=low, high=high, num_values=len(finite))


def compare(ours: Sequence[float], theirs: Sequence[float], *, is_paired: bool) -> Comparison:
    """Compares two samples of positive numbers, such as throughputs, neither of them empty.

    With fewer than six values the interval is no wider than their range, and two equal settings of three pairs would
    differ in a quarter of all cases. There, a t-test of the logarithms at 5 % must agree that there is a difference,
    else it is unknown.

    Each value is from one repetition. Pairs at the same index are from the same repetition, and so share the state of
    the machine.

    Returns:
        The ratio of ``ours`` over ``theirs``, and whether it differs from 1; "no difference" if 1 is in the interval,
        "unknown" with a single value or if the two tests disagree.
    """
    assert min(*ours, *theirs) > 0
    ratio = median_interval(a / b for a, b in zip(ours, theirs, strict=True)) if is_paired else None
    if ratio is None:
        num_values = min(len(ours), len(theirs))
        low, high = _bootstrap_ratio(ours, theirs) if num_values > 1 else (None, None)
        median = statistics.median(ours) / statistics.median(theirs)
        ratio = Interval(median=median, low=low, high=high, num_values=num_values)
    if ratio.low is None or ratio.high is None:
        return Comparison(ratio, "unknown")
    if ratio.low <= 1 <= ratio.high:
        return Comparison(ratio, "no difference")
    if ratio.num_values < MIN_VALUES_OF_AN_INTERVAL and not t_test_p(ours, theirs, is_paired=is_paired) < ERROR_RATE:
        return Comparison(ratio, "unknown")
    return Comparison(ratio, "faster" if ratio.median > 1 else "slower")


def _bootstrap_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Returns the percentile interval of the ratio of two medians, always the same for the same values."""
    import numpy
    import scipy.stats

    result = scipy.stats.bootstrap(
        (numpy.array(ours), numpy.array(theirs)),
        lambda drawn, base, axis: numpy.median(drawn, axis=axis) / numpy.median(base, axis=axis),
        vectorized=True,
        n_resamples=_NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=numpy.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def t_test_p(ours: Sequence[float], theirs: Sequence[float], *, is_paired: bool) -> float:
    """Returns the p-value of Student's t-test for pairs, or Welch's for two samples, of the logarithms.

    Samples are as `compare` takes them, of at least two values.
    """
    import scipy.stats

    samples = [[math.log(value) for value in sample] for sample in (ours, theirs)]
    if is_paired:
        samples = [[a - b for a, b in zip(*samples, strict=True)]]
    if all(max(sample) - min(sample) < ROUNDING for sample in samples):  # no noise at all
        means = [statistics.fmean(sample) for sample in samples]
        return float(abs(means[0] - (means[1] if len(means) > 1 else 0)) < ROUNDING)
    test = scipy.stats.ttest_1samp(samples[0], 0) if is_paired else scipy.stats.ttest_ind(*samples, equal_var=False)
    return float(test.pvalue)


def speedup_in_words(ratio: Interval, than: str) -> str:
    """Returns how much faster or slower a ratio of throughputs is.

    >>> speedup_in_words(Interval(median=1.654, low=1.58, high=1.71, num_values=3), "it")
    '65 % faster than it (58 to 71 % in 3 repetitions)'
    >>> speedup_in_words(Interval(median=2.31, low=None, high=None, num_values=1), "it")
    '2.3 times as fast as it'
    """
    if ratio.median >= _TIMES_FROM:
        return f"{ratio.median:.1f} times as fast as {than}{_ends(ratio, lambda value: f'{value:.1f}')}"
    is_faster = ratio.median >= 1
    if ratio.low is None or ratio.high is None:
        decimals = 0 if abs(ratio.median - 1) > 0.0995 else 1
    else:
        decimals = 0 if ratio.high - ratio.low >= 0.02 else 1

    def percent(value: float) -> str:
        change = 100 * (value - 1) if is_faster else 100 * (1 - value)
        return f"{round(change, decimals) + 0.0:.{decimals}f}"  # 0.0 turns -0 into 0

    return f"{percent(ratio.median)} % {'faster' if is_faster else 'slower'} than {than}{_ends(ratio, percent, ' %')}"


def kind_of_interval(interval: Interval) -> str:
    """Returns what the ends of an interval are."""
    is_range = interval.num_values < MIN_VALUES_OF_AN_INTERVAL
    return f"range of {interval.num_values} repetitions" if is_range else "95 % interval"


def kinds_of_intervals(intervals: Iterable[Interval | None]) -> str:
    """Returns what the ends of several intervals are; empty if none has ends."""
    counts = [interval.num_values for interval in intervals if interval is not None and interval.low is not None]
    if not counts or min(counts) >= MIN_VALUES_OF_AN_INTERVAL:
        return "95 % intervals" if counts else ""
    ranges = f"ranges of {min(counts)}" if min(counts) == max(counts) else f"ranges of {min(counts)} to {max(counts)}"
    if max(counts) < MIN_VALUES_OF_AN_INTERVAL:
        return f"{ranges} repetitions"
    return f"95 % intervals, or ranges of less than {MIN_VALUES_OF_AN_INTERVAL} repetitions"


def spread_text(interval: Interval, digits: int = 3) -> str:
    """Returns the ends of an interval; empty if it has none."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{number(interval.low, digits)} to {number(interval.high, digits)}"


def _ends(ratio: Interval, shown: Callable[[float], str], unit: str = "") -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    low, high = sorted([shown(ratio.low), shown(ratio.high)], key=float)
    is_range = ratio.num_values < MIN_VALUES_OF_AN_INTERVAL
    if low == high:
        return f" (in all {ratio.num_values} repetitions)" if is_range else ""
    span = f"{low} to {high}{unit}"
    return f" ({span} in {ratio.num_values} repetitions)" if is_range else f" (95 % interval {span})"
