"""How far medians of a few repetitions can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # its submodules, which take a second, are imported when they are first used

from lightning_commopt.report.model import Difference, Interval

CONFIDENCE = 0.95
_NUM_RESAMPLES = 9999

MIN_VALUES_OF_AN_INTERVAL = 6
"""With fewer values the percentile interval of a median is their range, and covers less than it should."""


class Comparison(NamedTuple):
    """What two samples say of each other.

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
    low, high = _bootstrap((np.array(finite),), np.median)
    return Interval(median=float(np.median(finite)), low=low, high=high, num_values=len(finite))


def compare(values: Sequence[float], reference: Sequence[float], *, is_paired: bool) -> Comparison:
    """Compares two samples of positive numbers, such as throughputs.

    With fewer than six values the interval is no wider than their range, and two equal settings of three pairs would
    be told apart in a quarter of all cases. There, a t-test of the logarithms at 5 % must agree that there is a
    difference, else it is unknown.

    Args:
        values: one for each repetition.
        reference: the same of what it is compared with.
        is_paired: the two of a place were measured in the same repetition, and share what the machine did then.

    Returns:
        The ratio of ``values`` over ``reference``, and whether it differs from 1; "no difference" if 1 is in the
        interval, "unknown" with a single value or if the two tests disagree.

    Raises:
        ValueError: a sample is empty, a value is not positive, or pairs are not of one length.
    """
    ours, theirs = np.array(values, dtype=float), np.array(reference, dtype=float)
    if not ours.size or not theirs.size or not (ours > 0).all() or not (theirs > 0).all():
        raise ValueError(f"samples must be of positive numbers, got {list(values)} and {list(reference)}")
    if is_paired and ours.size != theirs.size:
        raise ValueError(f"pairs must be of one length, got {ours.size} and {theirs.size}")
    num_values = min(ours.size, theirs.size)
    median = np.median(ours / theirs) if is_paired else np.median(ours) / np.median(theirs)
    if num_values == 1:
        return Comparison(Interval(median=float(median), low=None, high=None, num_values=1), "unknown")
    low, high = _bootstrap((ours / theirs,), np.median) if is_paired else _bootstrap((ours, theirs), _ratio_of_medians)
    ratio = Interval(median=float(median), low=low, high=high, num_values=num_values)
    if low <= 1 <= high:
        return Comparison(ratio, "no difference")
    if num_values < MIN_VALUES_OF_AN_INTERVAL and not _t_test_sees_a_difference(ours, theirs, is_paired):
        return Comparison(ratio, "unknown")
    return Comparison(ratio, "faster" if median > 1 else "slower")


def _bootstrap(samples: tuple[np.ndarray[Any, Any], ...], statistic: Any) -> tuple[float, float]:
    result = scipy.stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=_NUM_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _ratio_of_medians(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], axis: int = -1) -> Any:
    return np.median(ours, axis=axis) / np.median(theirs, axis=axis)


def _t_test_sees_a_difference(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], is_paired: bool) -> bool:
    """Student's test for pairs, Welch's for two samples; by hand, as equal values are no reason to warn."""
    logs = [np.log(ours / theirs)] if is_paired else [np.log(ours), np.log(theirs)]
    squared_errors = [log.var(ddof=1) / log.size for log in logs]
    shift = abs(logs[0].mean() if is_paired else logs[0].mean() - logs[1].mean())
    squared_error = sum(squared_errors)
    if squared_error == 0:
        return bool(shift > 0)
    parts = [part**2 / (log.size - 1) for part, log in zip(squared_errors, logs, strict=True)]
    degrees_of_freedom = squared_error**2 / sum(parts)
    half = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom) * math.sqrt(squared_error)
    return bool(shift > half)
