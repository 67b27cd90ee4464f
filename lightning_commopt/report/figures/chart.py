"""What the page draws: bars, which are HTML, and plots, with the words that belong to them.

Names, titles and legends are HTML, which the browser wraps in whatever font the reader has: nothing here knows how wide
a text is, and plots hold no text but the numbers at their axes.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plotly import graph_objects as go

from lightning_commopt.report.figures.style import PlanStyle

Swatch = Literal["computing", "hidden", "exposed", "bound", "waiting", "compressing", "wire", "stalled"]


class Key(NamedTuple):
    """What one of the shades of a chart means.

    Attributes:
        swatch: which shade.
        text: what it means.
    """

    swatch: Swatch
    text: str


class Line(NamedTuple):
    """A line of a plot, for its legend.

    Attributes:
        name: of the line.
        style: its look; None for the dotted grey of what is ideal.
    """

    name: str
    style: PlanStyle | None


class Part(NamedTuple):
    """A stretch of a bar.

    Attributes:
        start: where it begins, as a share of the axis.
        end: where it ends.
        hover: what to say of it.
        swatch: its shade; None for a colour.
        color: where there is no shade.
    """

    start: float
    end: float
    hover: str
    swatch: Swatch | None = None
    color: str = ""


class Bar(NamedTuple):
    """A bar below its name and its number.

    Attributes:
        name: of the setting.
        value: the number, with its unit.
        parts: from the back to the front.
        interval: ends of an error bar, as shares of the axis; None without.
    """

    name: str
    value: str
    parts: tuple[Part, ...]
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: bars, or a plot.

    Attributes:
        title: what it shows.
        note: how to read it; a sentence or two, plain text.
        x_title: name and unit of the horizontal axis.
        y_title: the same of the vertical axis; empty where its rows name themselves.
        bars: from the top; their axis begins at 0.
        figure: for plotly; None for bars.
        lines: of the plot, where they are not named otherwise.
        keys: shades that the chart itself does not name.
    """

    title: str
    note: str
    x_title: str
    y_title: str = ""
    bars: tuple[Bar, ...] = ()
    figure: go.Figure | None = None
    lines: tuple[Line, ...] = ()
    keys: tuple[Key, ...] = ()


def plain(text: str) -> str:
    """Returns a text that plotly shows as it is, whatever the user wrote."""
    return html.escape(text, quote=False)
