"""What all charts have in common: colours, axes, margins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plotly import graph_objects as go

FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif'
FONT_SIZE = 13
INK = "#1c2733"
QUIET = "#5b6876"
GRID = "#e3e8ed"

COMPUTING, HIDDEN, EXPOSED = "#c9d3dc", "#6f9fc8", "#b34a00"
"""Of a step: computing alone, computing while gradients travel, and waiting for them."""

UNUSED = "#f0f3f6"
"""What a bar could be filled up to."""

LEFT, TOP, BOTTOM = 54, 34, 52
"""Margins in pixels; the right one depends on the labels there."""

# Okabe and Ito's colours, told apart by the colour-blind, in an order of alternating lightness; yellow is left out, as
# it cannot be seen on white. The second of each pair is dark enough for text.
_COLORS = (
    ("#3d4a57", "#2b3640"),
    ("#0072b2", "#005f96"),
    ("#d55e00", "#a84a00"),
    ("#009e73", "#00704f"),
    ("#e69f00", "#8a5f00"),
    ("#aa4499", "#8a2f7b"),
    ("#56b4e9", "#1f6f9f"),
    ("#882255", "#882255"),
)
_DASHES = ("solid", "dash", "dashdot", "longdash", "4px,3px", "longdashdot", "10px,3px,2px,3px,2px,3px")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "star", "pentagon", "cross")


@dataclass(frozen=True, kw_only=True)
class PlanStyle:
    """How a plan looks in every chart; any two differ in more than the colour.

    Attributes:
        color: of lines, bars and markers.
        text_color: of its labels.
        dash: of lines.
        symbol: of markers.
    """

    color: str
    text_color: str
    dash: str
    symbol: str

    def variant(self, number: int) -> PlanStyle:
        """Returns the look of another line of the plan in the same chart, in the same colour.

        Args:
            number: 0 for the plan's own look, and so on.
        """
        dash, symbol = _DASHES.index(self.dash) + number, _SYMBOLS.index(self.symbol) + number
        return replace(self, dash=_DASHES[dash % len(_DASHES)], symbol=_SYMBOLS[symbol % len(_SYMBOLS)])


def plan_styles(plan_names: Iterable[str]) -> dict[str, PlanStyle]:
    """Returns a style for each plan, in the order in which they come."""
    return {
        name: PlanStyle(
            color=_COLORS[at % len(_COLORS)][0],
            text_color=_COLORS[at % len(_COLORS)][1],
            dash=_DASHES[at % len(_DASHES)],
            symbol=_SYMBOLS[at % len(_SYMBOLS)],
        )
        for at, name in enumerate(dict.fromkeys(plan_names))
    }


def line_styles(plan_names: Sequence[str], styles: Mapping[str, PlanStyle]) -> list[PlanStyle]:
    """Returns how each line of a chart looks: like its plan, and unlike the other lines of the plan."""
    return [styles[name].variant(plan_names[:at].count(name)) for at, name in enumerate(plan_names)]


def new_figure(*, x_title: str, y_title: str | None, plot_height: float, right: float = 16) -> go.Figure:
    """Returns an empty figure; it is as wide as the page lets it be.

    Args:
        x_title: name and unit of the axis.
        y_title: the same, written above the axis, where it needs no width; None for rows that name themselves.
        plot_height: of what is between the axes, in pixels.
        right: margin for labels, in pixels.
    """
    has_rows = y_title is None
    margin = {"l": 8 if has_rows else LEFT, "r": right, "t": 8 if has_rows else TOP, "b": BOTTOM, "pad": 0}
    figure = go.Figure(
        layout=go.Layout(
            template=None,
            autosize=True,
            height=round(plot_height + margin["t"] + margin["b"]),
            margin=margin,
            font={"family": FONT, "size": FONT_SIZE, "color": INK},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            showlegend=False,
            dragmode=False,  # a finger on a chart scrolls the page
            hovermode="closest",
            hoverlabel={"bgcolor": "#ffffff", "bordercolor": QUIET, "font": {"family": FONT, "color": INK}},
            barmode="overlay",
            xaxis={**_AXIS, "title": {"text": x_title, "standoff": 10, "font": _TITLE}},
            yaxis={**_AXIS, "showgrid": not has_rows, "showticklabels": not has_rows},
        )
    )
    if y_title is not None:
        figure.add_annotation(
            text=y_title,
            name="y title",
            font=_TITLE,
            showarrow=False,
            align="left",
            xref="paper",
            yref="paper",
            x=0,
            y=1,
            xanchor="left",
            yanchor="bottom",
            xshift=-LEFT + 2,
            yshift=8,
        )
    return figure


_TITLE = {"color": QUIET, "size": FONT_SIZE}
_AXIS: Mapping[str, Any] = {
    "showgrid": True,
    "gridcolor": GRID,
    "zeroline": False,
    "showline": False,
    "ticks": "",
    "fixedrange": True,
    "tickfont": {"color": QUIET},
}
