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
        """Returns how long a message takes."""
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
    best: tuple[Segment, ...] = (_fit(points),)
    best_score = math.inf
    for num_segments in range(1, min(_MAX_SEGMENTS, max(1, len(points) // _MIN_POINTS)) + 1):
        segments = _best_split(points, num_segments)
        squares = sum(_squares(_inside(points, segment), segment) for segment in segments)
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
    for number, point in enumerate(points):
        others = [*points[:number], *points[number + 1 :]]
        refitted = [_fit(inside) for segment in segments if (inside := _inside(others, segment))]
        errors.append(point.time_s / time_at(refitted, point.size_bytes) - 1 if refitted else 0.0)
    return errors


def _inside(points: Sequence[Point], segment: Segment) -> list[Point]:
    return [point for point in points if segment.first_bytes <= point.size_bytes <= segment.last_bytes]


def _best_split(points: Sequence[Point], num_segments: int) -> tuple[Segment, ...]:
    """Returns so many segments with the least sum of squares, by dynamic programming over where they begin."""
    size, fits = len(points), {}
    for start in range(size):
        for stop in range(start + 1, size + 1):
            if stop - start >= _MIN_POINTS or stop - start == size:
                segment = _fit(points[start:stop])
                fits[start, stop] = segment, _squares(points[start:stop], segment)
    best: dict[int, tuple[float, tuple[Segment, ...]]] = {0: (0.0, ())}
    for _ in range(num_segments):
        longer: dict[int, tuple[float, tuple[Segment, ...]]] = {}
        for (start, stop), (segment, squares) in fits.items():
            if start in best and best[start][0] + squares < longer.get(stop, (math.inf, ()))[0]:
                longer[stop] = best[start][0] + squares, (*best[start][1], segment)
        best = longer
    return best[size][1]


def _squares(points: Sequence[Point], segment: Segment) -> float:
    return sum(point.weight * (segment.time_s(point.size_bytes) / point.time_s - 1) ** 2 for point in points)


def _fit(points: Sequence[Point]) -> Segment:
    """Returns the line of least relative squares whose latency and inverse bandwidth are not below 0."""
    # The line is latency * inverse + s_per_byte * rate = 1 at every point; all times the root of its weight.
    ones = [math.sqrt(point.weight) for point in points]
    rates = [one * point.size_bytes / point.time_s for one, point in zip(ones, points, strict=True)]
    inverses = [one / point.time_s for one, point in zip(ones, points, strict=True)]
    aa, ab, bb = _dot(inverses, inverses), _dot(inverses, rates), _dot(rates, rates)
    a1, b1 = _dot(inverses, ones), _dot(rates, ones)
    determinant = aa * bb - ab * ab
    latency_s, s_per_byte = 0.0, b1 / bb
    if determinant > 1e-12 * aa * bb:
        latency_s, s_per_byte = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if s_per_byte < 0:
            latency_s, s_per_byte = a1 / aa, 0.0
        elif latency_s < 0:
            latency_s, s_per_byte = 0.0, b1 / bb
    return Segment(points[0].size_bytes, points[-1].size_bytes, latency_s, s_per_byte)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
