"""A plot as data. ``macros.html`` draws it as inline SVG, whose coordinates are percentages of the plot.

So a plot fills whatever width it gets, and its texts, markers and lines keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MAX_TICKS = 6  # the labels of so many ticks fit beside each other on a phone of 360 pixels
_MARGIN = 0.05  # share of an axis that is kept free beyond the outermost values
_MIN_RATIO = 2.5  # the ends of a logarithmic axis, so that one of 1, 2 and 5 lies on it


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from its lowest to its highest value, with the values and texts of its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Returns where a value lies on the axis, in per cent of its length."""
        low, high, at = (math.log(end) if self.is_log else end for end in (self.low, self.high, value))
        return 100 * (at - low) / (high - low)


class Point(NamedTuple):
    """A point, the ends of its error bars, its tooltip, and a word that is written beside it."""

    x: float
    y: float
    hover: str = ""
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Points of one look, joined by a line, marked by symbols, or both."""

    points: tuple[Point, ...]
    color: str  # a color of CSS, such as "var(--plan-0)"
    dash: str | None = None  # the line's dash in SVG's notation, "none" for a solid line; None for no line
    symbol: str | None = None  # one of `style.SYMBOLS`; None for no markers
    width: float = 2.0  # width of the line, in pixels
    hover: str = ""  # the tooltip of the line
    is_marked: bool = False  # whether a ring is drawn around the points


class Band(NamedTuple):
    """A shaded rectangle behind the points; without ends along an axis it covers all of the axis."""

    color: str
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    hover: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Axes and what is drawn between them, from back to front."""

    x: Axis
    y: Axis
    traces: tuple[Trace, ...]
    bands: tuple[Band, ...] = ()
    height: int = 300  # pixels

    def line(self, trace: Trace) -> str:
        """Returns the points of a trace for an SVG polyline, in thousandths of the plot."""
        places = ((10 * self.x.place(point.x), 10 * (100 - self.y.place(point.y))) for point in trace.points)
        return " ".join(f"{across:.0f},{down:.0f}" for across, down in places)


def linear_axis(
    values: Iterable[float], *, from_zero: bool = False, ends: tuple[float, float] | None = None, unit: str = ""
) -> Axis:
    """Returns an axis around finite values, with at most six ticks at round numbers.

    Args:
        values: what must lie on it; may be empty if there are ``ends``.
        from_zero: whether it reaches down to zero.
        ends: its lowest and highest value; None for some margin around the values.
        unit: is written behind the number of each tick.
    """
    if ends is None:
        known = [*values, *([0.0] if from_zero else [])]
        low, high = min(known), max(known)
        margin = _MARGIN * (high - low or abs(high) or 1.0)
        ends = low if from_zero and low == 0 else low - margin, high + margin
    low, high = ends
    rough = (high - low) / _MAX_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple((number * step, f"{number * step:,.{decimals}f}{unit}") for number in range(first, last + 1))
    return Axis(low=low, high=high, ticks=ticks)


def log_axis(values: Iterable[float], ticks: Sequence[tuple[float, str]] = ()) -> Axis:
    """Returns a logarithmic axis around positive values, with the given ticks or at most six of 1, 2 and 5."""
    known = list(values)
    ratio = max(known) / min(known)
    margin = max(ratio**_MARGIN, math.sqrt(_MIN_RATIO / ratio))
    low, high = max(min(known) / margin, 1e-307), min(max(known) * margin, 1e308)  # a diverging loss comes that far
    if not ticks:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            round_numbers = [factor * 10.0**decade for decade in decades for factor in factors]
            shown = [value for value in round_numbers if low <= value <= high]
            if len(shown) <= _MAX_TICKS:
                break
        stride = max(1, math.ceil(len(shown) / _MAX_TICKS))
        ticks = [(value, f"{value:g}") for value in shown[::stride]]
    return Axis(low=low, high=high, ticks=tuple(ticks), is_log=True)


def category_axis(names: Sequence[str]) -> Axis:
    """Returns an axis with a place for each name, which are numbered from 0."""
    return Axis(low=-0.5, high=len(names) - 0.5, ticks=tuple((float(at), name) for at, name in enumerate(names)))


def extent(traces: Iterable[Trace]) -> tuple[list[float], list[float]]:
    """Returns all values along both axes, the ends of error bars included."""
    points = [point for trace in traces for point in trace.points]
    return (
        [value for point in points for value in (point.x, *(point.x_ends or ()))],
        [value for point in points for value in (point.y, *(point.y_ends or ()))],
    )
