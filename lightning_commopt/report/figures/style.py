"""The parts that charts are made of, and the looks of plans. `report.css` has the colors, for light and dark pages.

A chart is bars or lanes of a timeline, which are HTML, or a plot, which is SVG. Names, titles, legends and numbers at
axes are HTML, which the browser wraps in any font. So no code here needs the width of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning_commopt.report.figures.plot import Axis, Plot, Point, Trace
from lightning_commopt.report.intervals import Interval
from lightning_commopt.report.model import Cell, Run, Setting

_NUM_COLORS = 8  # ``--plan-0`` to ``--plan-7`` of the style sheet
_DASHES = ("none", "8 5", "8 4 2 4", "14 5", "4 3", "14 4 2 4", "10 3 2 3 2 3")
SYMBOLS = {  # outlines of markers as SVG paths, in a square from -5 to 5
    "circle": "M5,0A5,5 0 1,1 -5,0A5,5 0 1,1 5,0Z",
    "square": "M-4,-4H4V4H-4Z",
    "diamond": "M0,-5L5,0L0,5L-5,0Z",
    "triangle-up": "M0,-5L5,4H-5Z",
    "x": "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0Z",
    "triangle-down": "M0,5L5,-4H-5Z",
    "star": "M0,-5L1.5,-1.6L5,-1.6L2.2,0.7L3.2,4.4L0,2.2L-3.2,4.4L-2.2,0.7L-5,-1.6L-1.5,-1.6Z",
    "pentagon": "M0,-5L4.8,-1.5L2.9,4.1H-2.9L-4.8,-1.5Z",
    "cross": "M-5,-1.6H-1.6V-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5Z",
}
IDEAL_COLOR, _IDEAL_DASH = "var(--quiet)", "2 4"


@dataclass(frozen=True, kw_only=True)
class PlanStyle:
    """The look of a plan in every chart: CSS color, SVG dash and symbol. Any two plans differ in all three."""

    color: str
    dash: str
    symbol: str

    def variant(self, number: int) -> PlanStyle:
        """Returns the look of the plan's n-th line in a chart, in the same color; 0 is the plan's own look."""
        symbols = list(SYMBOLS)
        return replace(
            self,
            dash=_DASHES[(_DASHES.index(self.dash) + number) % len(_DASHES)],
            symbol=symbols[(symbols.index(self.symbol) + number) % len(symbols)],
        )


def plan_styles(sync_methods: Iterable[str]) -> dict[str, PlanStyle]:
    """Returns a style for each plan, in the order given."""
    first = PlanStyle(color="", dash=_DASHES[0], symbol=next(iter(SYMBOLS)))
    return {
        name: replace(first.variant(at), color=f"var(--plan-{at % _NUM_COLORS})")
        for at, name in enumerate(dict.fromkeys(sync_methods))
    }


def line_styles(sync_methods: Sequence[str], styles: Mapping[str, PlanStyle]) -> list[PlanStyle]:
    """Returns the style of each line of a chart: its plan's style, varied if several lines have the same plan."""
    return [styles[name].variant(sync_methods[:at].count(name)) for at, name in enumerate(sync_methods)]


def ends_of(interval: Interval | None) -> tuple[float, float] | None:
    """Returns the ends of an interval; None without them."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def line_trace(style: PlanStyle, x: Sequence[float], intervals: Sequence[Interval], hover: Sequence[str]) -> Trace:
    """Returns a line with markers in the look of a plan, error bars up to the ends that are known, and tooltips."""
    points = (
        Point(at, interval.median, text, y_ends=ends_of(interval))
        for at, interval, text in zip(x, intervals, hover, strict=True)
    )
    return Trace(points=tuple(points), color=style.color, dash=style.dash, symbol=style.symbol)


def ideal_line(x: Sequence[float], y: Sequence[float]) -> Trace:
    """Returns the dotted grey line of an ideal."""
    points = tuple(map(Point, x, y))
    return Trace(points=points, color=IDEAL_COLOR, dash=_IDEAL_DASH, width=1.4)


def typical_run(setting: Setting) -> Run | None:
    """Returns the run of median throughput, or the first one without throughputs."""
    known = [run for run in setting.runs if run.record.samples_per_s is not None]
    known.sort(key=lambda run: run.record.samples_per_s or 0.0)
    return known[(len(known) - 1) // 2] if known else next(iter(setting.runs), None)


Swatch = Literal[
    "computing",
    "hidden",
    "exposed",
    "bound",
    "waiting",
    "compressing",
    "wire",
    "stalled",
    "data",
    "forward",
    "backward",
    "optimizer",
    "other",
]


class Key(NamedTuple):
    """The meaning of a shade."""

    swatch: Swatch
    text: str


class Line(NamedTuple):
    """A line of a plot, for its legend; without a style it is the dotted grey of an ideal."""

    name: str
    style: PlanStyle | None
    is_line: bool = True  # whether it is drawn as a line, and not as a marker alone


class Part(NamedTuple):
    """A part of a bar in a shade or a color; its ends are shares of the axis."""

    start: float
    end: float
    hover: str
    swatch: Swatch | None = None
    color: str = ""
    text: str = ""  # is written into the part, as far as it fits


class Bar(NamedTuple):
    """A bar below its name and its number, with parts from back to front; its interval is in shares of the axis."""

    name: str
    value: str
    parts: tuple[Part, ...]
    interval: tuple[float, float] | None = None


class Lane(NamedTuple):
    """A row of a timeline: the phases of a rank with its name, or a bucket without one."""

    name: str
    parts: tuple[Part, ...]
    height: float  # pixels


class Rows(NamedTuple):
    """A small table below a chart, or about all groups; the first cell of a row is its name."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: bars, lanes, or a plot. All texts are plain."""

    title: str
    note: str  # how to read it; a sentence or two
    x_title: str  # name and unit of the horizontal axis
    y_title: str = ""  # name and unit of the vertical axis; empty if its rows are named
    bars: tuple[Bar, ...] = ()  # the bars from top to bottom; their axis begins at 0
    plot: Plot | None = None
    lanes: tuple[Lane, ...] = ()  # the rows of a timeline from top to bottom
    lane_axis: Axis | None = None  # their axis
    lines: tuple[Line, ...] = ()
    keys: tuple[Key, ...] = ()
    rows: Rows | None = None  # a table below the plot
