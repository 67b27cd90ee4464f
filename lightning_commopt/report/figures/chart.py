"""The charts of the page: bars, which are HTML, and plots.

Names, titles and legends are HTML, which the browser wraps in any font; plots have no text but the numbers at their
axes. So no code here needs the width of a text.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plotly import graph_objects as go

from lightning_commopt.report.columns import Cell
from lightning_commopt.report.figures.style import PlanStyle

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
    """One chart: bars, or a plot.

    Attributes:
        title: plain text.
        note: how to read it; a sentence or two, plain text.
        x_title: name and unit of the horizontal axis.
        y_title: name and unit of the vertical axis; empty if its rows are named.
        bars: from the top; their axis begins at 0.
        figure: for plotly; None for bars.
        lines: of the plot's legend.
        keys: of the shades.
        rows: below the plot; None without.
    """

    title: str
    note: str
    x_title: str
    y_title: str = ""
    bars: tuple[Bar, ...] = ()
    figure: go.Figure | None = None
    lines: tuple[Line, ...] = ()
    keys: tuple[Key, ...] = ()
    rows: Rows | None = None


def plain(text: str) -> str:
    """Returns a text that plotly shows literally."""
    return html.escape(text, quote=False)
