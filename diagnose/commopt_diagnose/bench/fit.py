"""Fits latency and bandwidth to times by size, piecewise where the data require it.

A message of ``S`` bytes takes ``latency_s + S * s_per_byte``, with other values in each range of sizes. Errors are
relative, weighted by the precision of the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

_MAX_SEGMENTS = 4  # a library changes its algorithm or protocol at a few sizes
_MIN_POINTS = 3  # a line fits two points exactly, which says nothing about its error
_FLOOR = 0.01  # expected relative error of a line through real times, however exactly they were measured


class Segment(NamedTuple):
    """A range of measured sizes with one latency and one inverse bandwidth, neither below 0."""

    first_bytes: int
    last_bytes: int
    latency_s: float
    s_per_byte: float

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.s_per_byte


class Point(NamedTuple):
    """The median time of one size, and its relative error."""

    size_bytes: int
    time_s: float
    noise: float = 0.0  # an exact time, up to `_FLOOR`

    @property
    def weight(self) -> float:
        """The weight of this point's squared relative error in a fit."""
        return 1 / (self.noise**2 + _FLOOR**2)


def fit_segments(points: Sequence[Point]) -> tuple[Segment, ...]:
    """Returns the segments with the least Bayesian information criterion, for points in the order of sizes.

    >>> points = [Point(size, 1e-3 + size / 1e8) for size in (10**3, 10**4, 10**5, 10**6)]
    >>> [(f"{segment.latency_s:.2g}", f"{1 / segment.s_per_byte:.2g}") for segment in fit_segments(points)]
    [('0.001', '1e+08')]
    """
    fits = _fits(points)
    best: tuple[Segment, ...] = (fits[0, len(points)].segment,)
    best_score = math.inf
    for num_segments in range(1, min(_MAX_SEGMENTS, max(1, len(points) // _MIN_POINTS)) + 1):
        squares, segments = _best_split(fits, len(points), num_segments)
        # A segment has three parameters: latency, bandwidth, and where it begins.
        score = squares + 3 * num_segments * math.log(len(points))
        if score < best_score:
            best, best_score = segments, score
    return best


def time_at(segments: Sequence[Segment], size_bytes: float) -> float:
    """Returns the time of a message of any size; between two segments, interpolated between their ends."""
    for segment, following in pairwise(segments):
        if size_bytes <= segment.last_bytes:
            return segment.time_s(size_bytes)
        if size_bytes < following.first_bytes:
            ends = segment.time_s(segment.last_bytes), following.time_s(following.first_bytes)
            share = (size_bytes - segment.last_bytes) / (following.first_bytes - segment.last_bytes)
            return ends[0] + share * (ends[1] - ends[0])
    return segments[-1].time_s(size_bytes)


def errors_left_out(points: Sequence[Point], segments: Sequence[Segment]) -> list[float]:
    """Returns the cross-validation error of each point: its time over the prediction of a fit without it, minus 1.

    The fit without a point has the same segments as the fit to all.
    """
    errors = []
    for point in points:
        own = next(segment for segment in segments if point.size_bytes <= segment.last_bytes)
        inside = [other for other in points if own.first_bytes <= other.size_bytes <= own.last_bytes]
        others = [other for other in inside if other is not point]
        without = [_fit_line(others[0], others[-1], *_sums(others)[-1]).segment] if others else []
        refitted = [fitted for segment in segments for fitted in (without if segment is own else [segment])]
        errors.append(point.time_s / time_at(refitted, point.size_bytes) - 1 if refitted else 0.0)
    return errors


class _Fitted(NamedTuple):
    segment: Segment
    squares: float  # sum of its points' weighted squared relative errors


def _fits(points: Sequence[Point]) -> dict[tuple[int, int], _Fitted]:
    """Returns the fits to all runs of points that are long enough, and to all points."""
    fits = {}
    for start, first in enumerate(points):
        for stop, sums in enumerate(_sums(points[start:]), start + 1):
            if stop - start >= _MIN_POINTS or stop - start == len(points):
                fits[start, stop] = _fit_line(first, points[stop - 1], *sums)
    return fits


def _best_split(
    fits: dict[tuple[int, int], _Fitted], num_points: int, num_segments: int
) -> tuple[float, tuple[Segment, ...]]:
    """Returns the least sum of squares and its segments, by dynamic programming over where the segments begin."""
    best: dict[int, tuple[float, tuple[Segment, ...]]] = {0: (0.0, ())}
    for _ in range(num_segments):
        longer: dict[int, tuple[float, tuple[Segment, ...]]] = {}
        for (start, stop), (segment, squares) in fits.items():
            if start in best and best[start][0] + squares < longer.get(stop, (math.inf, ()))[0]:
                longer[stop] = best[start][0] + squares, (*best[start][1], segment)
        best = longer
    return best[num_points]


def _sums(points: Sequence[Point]) -> list[list[float]]:
    """Returns the sums that `_fit_line` needs, over the first point, over the first two, and so on."""
    terms = []
    for point in points:
        weight, inverse, rate = point.weight, 1 / point.time_s, point.size_bytes / point.time_s
        a, b = weight * inverse, weight * rate
        terms.append((weight, a, b, a * inverse, a * rate, b * rate))
    sums: list[list[float]] = np.cumsum(terms, axis=0).tolist()
    return sums


def _fit_line(first: Point, last: Point, one: float, a1: float, b1: float, aa: float, ab: float, bb: float) -> _Fitted:
    """Fits the line of least squares of a * latency_s + b * s_per_byte - 1, neither of which is below 0.

    ``a`` is the inverse time of a point, ``b`` its rate; the arguments are weighted sums of 1, a, b, aa, ab and bb.
    """
    latency_s, s_per_byte, determinant = 0.0, b1 / bb, aa * bb - ab * ab
    # Points of one size have no determinant but for rounding: they fix a bandwidth, and no latency.
    if determinant > 1e-12 * aa * bb:
        both = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if both[1] < 0:
            latency_s, s_per_byte = a1 / aa, 0.0
        elif both[0] >= 0:
            latency_s, s_per_byte = both
    linear = latency_s * a1 + s_per_byte * b1
    mixed = latency_s * latency_s * aa + 2 * latency_s * s_per_byte * ab + s_per_byte * s_per_byte * bb
    squares = mixed - 2 * linear + one
    return _Fitted(Segment(first.size_bytes, last.size_bytes, latency_s, s_per_byte), squares)
