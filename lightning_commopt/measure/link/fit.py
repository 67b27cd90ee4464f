"""Latency and bandwidth fitted to times by size, in as many pieces as the data ask for.

A message of ``S`` bytes takes ``latency_s + S * s_per_byte``, with values of its own in each range of sizes. Errors are
relative, and weigh by how exactly a size was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_MAX_SEGMENTS = 4
_MIN_POINTS = 3
_FLOOR = 0.01
"""A line through real times is expected to be off by as much, however exactly they were measured."""


class Segment(NamedTuple):
    """A range of sizes with one latency and one bandwidth.

    Attributes:
        first_bytes: the smallest size measured in it.
        last_bytes: the largest.
        latency_s: of a message without content; at least 0.
        s_per_byte: the inverse of the bandwidth; at least 0.
    """

    first_bytes: int
    last_bytes: int
    latency_s: float
    s_per_byte: float

    def time_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.s_per_byte


class Point(NamedTuple):
    """What was measured of one size.

    Attributes:
        size_bytes: of the message.
        time_s: the median.
        noise: how far that may be off, relative.
    """

    size_bytes: int
    time_s: float
    noise: float = 0.0

    @property
    def weight(self) -> float:
        """Of the squared relative error."""
        return 1 / (self.noise**2 + _FLOOR**2)


def fit_segments(points: Sequence[Point]) -> tuple[Segment, ...]:
    """Returns the segments with the least Bayesian information criterion.

    Args:
        points: one for each size, in the order of sizes; at least one.

    >>> points = [Point(size, 1e-3 + size / 1e8) for size in (10**3, 10**4, 10**5, 10**6)]
    >>> [(f"{each.latency_s:.2g}", f"{1 / each.s_per_byte:.2g}") for each in fit_segments(points)]
    [('0.001', '1e+08')]
    """
    fits = _fits(points)
    best: tuple[Segment, ...] = (fits[0, len(points)].segment,)
    best_score = math.inf
    for num_segments in range(1, min(_MAX_SEGMENTS, max(1, len(points) // _MIN_POINTS)) + 1):
        squares, segments = _best_split(fits, len(points), num_segments)
        score = squares + 3 * num_segments * math.log(len(points))
        if score < best_score:
            best, best_score = segments, score
    return best


def time_at(segments: Sequence[Segment], size_bytes: float) -> float:
    """Returns the time of a message; between two segments, what lies between their ends.

    Args:
        segments: in the order of sizes.
        size_bytes: of the message, which may lie beyond them.
    """
    for segment, following in pairwise(segments):
        if size_bytes <= segment.last_bytes:
            return segment.time_s(size_bytes)
        if size_bytes < following.first_bytes:
            ends = segment.time_s(segment.last_bytes), following.time_s(following.first_bytes)
            share = (size_bytes - segment.last_bytes) / (following.first_bytes - segment.last_bytes)
            return ends[0] + share * (ends[1] - ends[0])
    return segments[-1].time_s(size_bytes)


def errors_left_out(points: Sequence[Point], segments: Sequence[Segment]) -> list[float]:
    """Returns for each point its time over the prediction by a fit without it, in the same segments, minus 1.

    Args:
        points: that ``segments`` were fitted to.
        segments: their ends stay as they are.
    """
    errors = []
    for point in points:
        own = next(segment for segment in segments if point.size_bytes <= segment.last_bytes)
        inside = [each for each in points if own.first_bytes <= each.size_bytes <= own.last_bytes]
        others = [each for each in inside if each is not point]
        without = [_fit(others)] if others else []
        refitted = [fitted for segment in segments for fitted in (without if segment is own else [segment])]
        errors.append(point.time_s / time_at(refitted, point.size_bytes) - 1 if refitted else 0.0)
    return errors


class _Fitted(NamedTuple):
    """A segment and the sum of its points' weighted squared relative errors."""

    segment: Segment
    squares: float


def _fits(points: Sequence[Point]) -> dict[tuple[int, int], _Fitted]:
    """Returns the fits to all runs of points that are long enough, and to all points."""
    fits = {}
    for start, first in enumerate(points):
        sums = _Sums()
        for stop, last in enumerate(points[start:], start + 1):
            sums.add(last)
            if stop - start >= _MIN_POINTS or stop - start == len(points):
                segment = Segment(first.size_bytes, last.size_bytes, *sums.line())
                fits[start, stop] = _Fitted(segment, sums.squares(segment))
    return fits


def _best_split(
    fits: dict[tuple[int, int], _Fitted], num_points: int, num_segments: int
) -> tuple[float, tuple[Segment, ...]]:
    """Returns the least sum of squares of so many segments, and these; by dynamic programming over where they begin."""
    best: dict[int, tuple[float, tuple[Segment, ...]]] = {0: (0.0, ())}
    for _ in range(num_segments):
        longer: dict[int, tuple[float, tuple[Segment, ...]]] = {}
        for (start, stop), (segment, squares) in fits.items():
            if start in best and best[start][0] + squares < longer.get(stop, (math.inf, ()))[0]:
                longer[stop] = best[start][0] + squares, (*best[start][1], segment)
        best = longer
    return best[num_points]


def _fit(points: Sequence[Point]) -> Segment:
    sums = _Sums()
    for point in points:
        sums.add(point)
    return Segment(points[0].size_bytes, points[-1].size_bytes, *sums.line())


class _Sums:
    """What the line of least relative squares needs of its points: latency * inverse + s_per_byte * rate is near 1."""

    __slots__ = ("inverses", "inverses_rates", "rates", "squared_inverses", "squared_rates", "weights")

    def __init__(self) -> None:
        self.weights = self.inverses = self.rates = 0.0
        self.squared_inverses = self.inverses_rates = self.squared_rates = 0.0

    def add(self, point: Point) -> None:
        weight = point.weight
        inverse, rate = 1 / point.time_s, point.size_bytes / point.time_s
        self.weights += weight
        self.inverses += weight * inverse
        self.rates += weight * rate
        self.squared_inverses += weight * inverse * inverse
        self.inverses_rates += weight * inverse * rate
        self.squared_rates += weight * rate * rate

    def line(self) -> tuple[float, float]:
        """Returns the latency and the seconds of a byte, neither of them below 0."""
        aa, ab, bb = self.squared_inverses, self.inverses_rates, self.squared_rates
        a1, b1 = self.inverses, self.rates
        determinant = aa * bb - ab * ab
        if determinant <= 1e-12 * aa * bb:
            return 0.0, b1 / bb
        latency_s, s_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if s_per_byte < 0:
            return a1 / aa, 0.0
        if latency_s < 0:
            return 0.0, b1 / bb
        return latency_s, s_per_byte

    def squares(self, line: Segment) -> float:
        """Returns the weighted sum of squared relative errors of a line."""
        a, b = line.latency_s, line.s_per_byte
        linear = a * self.inverses + b * self.rates
        mixed = a * a * self.squared_inverses + 2 * a * b * self.inverses_rates + b * b * self.squared_rates
        return mixed - 2 * linear + self.weights
