"""The parts that charts are made of, and their style, which ``style.yaml`` holds.

A chart is bars, which are HTML, or a plot. Names, titles and legends are HTML, which the browser wraps in any font;
plots have no text but the numbers at their axes. So no code here needs the width of a text.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import yaml
from plotly import graph_objects as go

from lightning_commopt.report.intervals import Interval
from lightning_commopt.report.model import Cell, Run, Setting

_STYLE: dict[str, Any] = yaml.safe_load(
    (files("lightning_commopt.report.figures") / "style.yaml").read_text(encoding="utf-8")
)
INK, QUIET, GRID, EXPOSED = (_STYLE[name] for name in ("ink", "quiet", "grid", "exposed"))
SPAN_COLORS: dict[str, str] = _STYLE["spans"]
_COLORS, _DASHES, _SYMBOLS = _STYLE["colors"], _STYLE["dashes"], _STYLE["symbols"]


@dataclass(frozen=True, kw_only=True)
class PlanStyle:
    """The look of a plan in every chart: a color, and plotly's dash and symbol. Any two plans differ in all three."""

    color: str
    dash: str
    symbol: str

    @property
    def dash_array(self) -> str:
        """The dash in SVG's notation."""
        return "none" if self.dash == "solid" else self.dash.replace("px", "")

    @property
    def outline(self) -> str:
        """The symbol as an SVG path in a square from -5 to 5."""
        path: str = _SYMBOLS[self.symbol]
        return path

    def variant(self, number: int) -> PlanStyle:
        """Returns the look of the plan's n-th line in a chart, in the same color; 0 is the plan's own look."""
        return replace(
            self,
            dash=_DASHES[(_DASHES.index(self.dash) + number) % len(_DASHES)],
            symbol=list(_SYMBOLS)[(list(_SYMBOLS).index(self.symbol) + number) % len(_SYMBOLS)],
        )

    def marker(self, size: int) -> dict[str, object]:
        return {"color": self.color, "symbol": self.symbol, "size": size}


def plan_styles(sync_methods: Iterable[str]) -> dict[str, PlanStyle]:
    """Returns a style for each plan, in the order given."""
    first = PlanStyle(color="", dash=_DASHES[0], symbol=next(iter(_SYMBOLS)))
    return {
        name: replace(first.variant(at), color=_COLORS[at % len(_COLORS)])
        for at, name in enumerate(dict.fromkeys(sync_methods))
    }


def line_styles(sync_methods: Sequence[str], styles: Mapping[str, PlanStyle]) -> list[PlanStyle]:
    """Returns the style of each line of a chart: its plan's style, varied if several lines have the same plan."""
    return [styles[name].variant(sync_methods[:at].count(name)) for at, name in enumerate(sync_methods)]


def new_figure(plot_height: float = 320) -> go.Figure:
    """Returns an empty figure of a height in pixels, as wide as the page, with automatic margins."""
    return go.Figure(layout=go.Layout(template=None, height=round(plot_height), **_STYLE["layout"]))


def line_trace(
    style: PlanStyle, x: Sequence[object], intervals: Sequence[Interval], hover: Sequence[str]
) -> go.Scatter:
    """Returns a line with markers in the look of a plan, error bars up to the ends that are known, and hover texts."""
    return go.Scatter(
        mode="lines+markers",
        x=x,
        y=[interval.median for interval in intervals],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [0.0 if interval.high is None else interval.high - interval.median for interval in intervals],
            "arrayminus": [0.0 if interval.low is None else interval.median - interval.low for interval in intervals],
            "visible": any(interval.low is not None for interval in intervals),
            "thickness": 1.4,
            "width": 4,
            "color": style.color,
        },
        hovertext=hover,
        hoverinfo="text",
        line={"color": style.color, "dash": style.dash, "width": 2.2},
        marker=style.marker(9),
    )


def ideal_line(x: Sequence[float], y: Sequence[float]) -> go.Scatter:
    """Returns the dotted grey line of an ideal."""
    return go.Scatter(mode="lines", x=x, y=y, line={"color": QUIET, "dash": "2px,4px", "width": 1.4}, hoverinfo="skip")


def typical_run(setting: Setting) -> Run | None:
    """Returns the run of median throughput, or the first one without throughputs."""
    known = [run for run in setting.runs if run.record.samples_per_s is not None]
    known.sort(key=lambda run: run.record.samples_per_s or 0.0)
    return known[(len(known) - 1) // 2] if known else next(iter(setting.runs), None)


Swatch = Literal["computing", "hidden", "exposed", "bound", "waiting", "compressing", "wire", "stalled"]


class Key(NamedTuple):
    """The meaning of a shade."""

    swatch: Swatch
    text: str


class Line(NamedTuple):
    """A line of a plot, for its legend; without a style it is the dotted grey of an ideal."""

    name: str
    style: PlanStyle | None


class Part(NamedTuple):
    """A part of a bar in a shade or a color; its ends are shares of the axis."""

    start: float
    end: float
    hover: str
    swatch: Swatch | None = None
    color: str = ""


class Bar(NamedTuple):
    """A bar below its name and its number, with parts from back to front; its interval is in shares of the axis."""

    name: str
    value: str
    parts: tuple[Part, ...]
    interval: tuple[float, float] | None = None


class Rows(NamedTuple):
    """A small table below a chart, or about all groups; the first cell of a row is its name."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[Cell, ...]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: bars, or a plot. All texts are plain."""

    title: str
    note: str  # how to read it; a sentence or two
    x_title: str  # name and unit of the horizontal axis
    y_title: str = ""  # name and unit of the vertical axis; empty if its rows are named
    bars: tuple[Bar, ...] = ()  # the bars from top to bottom; their axis begins at 0
    figure: go.Figure | None = None  # the plot; None for bars
    lines: tuple[Line, ...] = ()
    keys: tuple[Key, ...] = ()
    rows: Rows | None = None  # a table below the plot


def plain(text: str) -> str:
    """Returns a text that plotly shows literally."""
    return html.escape(text, quote=False)
