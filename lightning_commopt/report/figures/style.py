"""What all charts share: their parts, and their style: colours, dashes, symbols, axes.

A chart is bars, which are HTML, or a plot. Names, titles and legends are HTML, which the browser wraps in any font;
plots have no text but the numbers at their axes. So no code here needs the width of a text.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from plotly import graph_objects as go

from lightning_commopt.report.intervals import Interval
from lightning_commopt.report.model import Cell, Run, Setting

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif'
FONT_SIZE = 13
INK = "#1c2733"
QUIET = "#5b6876"
GRID = "#e3e8ed"
EXPOSED = "#b34a00"  # waiting for gradients, in a step

# Okabe and Ito's colours, which the colour-blind can distinguish, in alternating lightness; without yellow, which is
# invisible on white.
_COLORS = ("#3d4a57", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#aa4499", "#56b4e9", "#882255")
_DASHES = (
    *("solid", "8px,5px", "8px,4px,2px,4px", "14px,5px", "4px,3px", "14px,4px,2px,4px"),
    "10px,3px,2px,3px,2px,3px",
)
_SYMBOLS = {  # plotly's name, and the outline in a square from -5 to 5
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


@dataclass(frozen=True, kw_only=True)
class PlanStyle:
    """The look of a plan in every chart: a colour, and plotly's dash and symbol; any two plans differ in all."""

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
        return _SYMBOLS[self.symbol]

    def variant(self, number: int) -> PlanStyle:
        """Returns the look of the plan's n-th line in a chart, in the same colour; 0 is the plan's own look."""
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
    """Returns the style of each line of a chart: that of its plan, varied between lines of one plan."""
    return [styles[name].variant(sync_methods[:at].count(name)) for at, name in enumerate(sync_methods)]


def new_figure(plot_height: float = 320) -> go.Figure:
    """Returns an empty figure of a height in pixels, as wide as the page, with automatic margins."""
    axis = {
        "showgrid": True,
        "gridcolor": GRID,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "fixedrange": True,
        "automargin": True,
        "nticks": 6,
        "tickfont": {"color": QUIET},
    }
    return go.Figure(
        layout=go.Layout(
            template=None,
            autosize=True,
            height=round(plot_height),
            margin={"l": 8, "r": 28, "t": 10, "b": 24, "pad": 0},
            font={"family": FONT, "size": FONT_SIZE, "color": INK},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            showlegend=False,
            dragmode=False,  # a finger on a chart scrolls the page
            hovermode="closest",
            hoverlabel={"bgcolor": "#ffffff", "bordercolor": QUIET, "font": {"family": FONT, "color": INK}},
            barmode="overlay",
            xaxis=axis,
            yaxis=axis,
        )
    )


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
            "array": [0.0 if one.high is None else one.high - one.median for one in intervals],
            "arrayminus": [0.0 if one.low is None else one.median - one.low for one in intervals],
            "visible": any(one.low is not None for one in intervals),
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
    """A part of a bar in a shade or a colour; its ends are shares of the axis."""

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
    """A small table, of a chart or of all groups; the first cell of a row is its name."""

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
    bars: tuple[Bar, ...] = ()  # from the top; their axis begins at 0
    figure: go.Figure | None = None  # for plotly; None for bars
    lines: tuple[Line, ...] = ()
    keys: tuple[Key, ...] = ()
    rows: Rows | None = None  # a table below the plot


def plain(text: str) -> str:
    """Returns a text that plotly shows literally."""
    return html.escape(text, quote=False)
