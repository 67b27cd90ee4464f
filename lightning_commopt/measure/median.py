"""Medians with their confidence intervals or their spread, without numpy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from math import comb
from typing import NamedTuple

CONFIDENCE = 0.95  # confidence level of all intervals; tables and docs call them "95 %"
_BLOCK = 10  # steps: few enough that a run has several blocks


class Median(NamedTuple):
    """A median and the ends of its interval."""

    median: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Median:
    """Returns the median with a 95 % interval from order statistics, whatever the distribution.

    It is interpolated between the two intervals nearest to 95 %. Of fewer than six values it is their range, which
    covers less: 75 % of three, 94 % of five.

    Source: Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics", 1986.

    >>> median_of([3.0, 1.0, 2.0])
    Median(median=2.0, low=1.0, high=3.0)
    >>> [round(value, 2) for value in median_of(range(20))]
    [9.5, 5.24, 13.76]
    """
    ordered = sorted(values)
    skipped, weight = _interval_end(len(ordered))
    if not weight:
        return Median(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped])
    low = (1 - weight) * ordered[skipped] + weight * ordered[skipped + 1]
    high = (1 - weight) * ordered[-1 - skipped] + weight * ordered[-2 - skipped]
    return Median(statistics.median(ordered), low, high)


def block_medians(step_values: Sequence[float]) -> list[float]:
    """Returns the medians of every ten steps: a prediction is a median of many steps, and this is what it varies by."""
    return [statistics.median(step_values[start : start + _BLOCK]) for start in range(0, len(step_values), _BLOCK)]


@cache
def _interval_end(num_values: int) -> tuple[int, float]:
    """Returns how many values to skip at each end to cover at least 95 %, and the weight of the next value."""
    coverage, skipped = 1 - 2 / 2**num_values, 0
    if num_values < 2 or coverage < CONFIDENCE:
        return 0, 0.0
    while (inner := coverage - 2 * comb(num_values, skipped + 1) / 2**num_values) >= CONFIDENCE:
        coverage, skipped = inner, skipped + 1
    share, num_before = (coverage - CONFIDENCE) / (coverage - inner), skipped + 1
    return skipped, (num_values - num_before) * share / (num_before + (num_values - 2 * num_before) * share)
