"""Names written beside lines and above bars, so that no legend has to be searched."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from plotly import graph_objects as go

from lightning_commopt.report.figures.style import BOTTOM, FONT_SIZE, TOP

LINE_HEIGHT = 17
_CHARACTER_WIDTH = 7.0
_MOST_CHARACTERS = 15
_GAP = 3
_LEADER = 14


class LineEnd(NamedTuple):
    """Where a line ends, and what is to be written there.

    Attributes:
        x: last value.
        y: last value.
        text: any text of the user's.
        color: of the text.
    """

    x: float
    y: float
    text: str
    color: str


class Range(NamedTuple):
    """Of a vertical axis.

    Attributes:
        low: value at the bottom.
        high: value at the top.
        is_log: whether the axis is logarithmic.
    """

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Returns where a value is: 0 at the top, 1 at the bottom."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.is_log else (*self[:2], value)
        return (high - value) / (high - low)


def plain(text: str) -> str:
    """Returns a text that plotly shows as it is, whatever the user wrote."""
    return html.escape(text, quote=False)


def wrap(text: str, width: int = _MOST_CHARACTERS, num_lines: int = 3) -> list[str]:
    """Breaks a text into lines; what does not fit into them is cut off.

    >>> wrap("powersgd rank 4, 100 MB", width=16)
    ['powersgd rank 4,', '100 MB']
    """
    return textwrap.wrap(text, width, max_lines=num_lines, placeholder=" …") or [""]


def spread(centers: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Moves stretches of a line as little as needed for none to overlap another.

    Those that collide are put side by side around the middle of where they wanted to be.

    Args:
        centers: where each wants to be.
        heights: how much room each needs.

    Returns:
        The new centres, in the given order.

    >>> spread([0, 1, 10], [4, 4, 4])
    [-1.5, 2.5, 10.0]
    """
    blocks: list[tuple[float, float, list[int]]] = []  # centre, height, which
    for index in sorted(range(len(centers)), key=centers.__getitem__):
        center, height, members = float(centers[index]), float(heights[index]), [index]
        while blocks and blocks[-1][0] + blocks[-1][1] / 2 > center - height / 2:
            above, above_height, others = blocks.pop()
            center = (above * len(others) + (center + 0.0) * len(members)) / (len(others) + len(members))
            height, members = height + above_height, others + members
        blocks.append((center, height, members))
    found = [0.0] * len(centers)
    for center, height, members in blocks:
        top = center - height / 2
        for index in members:
            found[index] = top + heights[index] / 2
            top += heights[index]
    return found


def plot_height(ends: Sequence[LineEnd], least: float = 270) -> float:
    """Returns how high a plot must be for all labels to have room, in pixels."""
    return max(least, sum(map(_height, ends)))


def right_margin(ends: Sequence[LineEnd]) -> float:
    """Returns what labels need beside the plot, in pixels."""
    longest = max((len(line) for end in ends for line in wrap(end.text)), default=0)
    return _LEADER + 10 + longest * _CHARACTER_WIDTH


def label_ends(
    figure: go.Figure, ends: Sequence[LineEnd], y_range: Range, *, x_is_log: bool = False, are_apart: bool = False
) -> None:
    """Writes a text at the end of each line, none above another.

    Args:
        figure: gets the texts, and the range of its vertical axis.
        ends: of the lines.
        y_range: of the axis.
        x_is_log: whether the horizontal axis is logarithmic.
        are_apart: lines end in different places, and come from above: a label stands above those further right.
    """
    height = figure.layout.height - TOP - BOTTOM
    wanted = [y_range.at(end.y) * height for end in ends]
    heights = [_height(end) for end in ends]
    places = _inside(_stairs(ends, wanted) if are_apart else spread(wanted, heights), heights, height)
    for end, here, there in zip(ends, wanted, places, strict=True):
        figure.add_annotation(
            x=math.log10(end.x) if x_is_log else end.x,
            y=math.log10(end.y) if y_range.is_log else end.y,
            text="<br>".join(map(plain, wrap(end.text))),
            name="label",
            font={"color": end.color, "size": FONT_SIZE},
            align="left",
            xanchor="left",
            ax=_LEADER,
            ay=there - here,
            standoff=5,
            showarrow=True,
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=end.color,
            bgcolor="rgba(255,255,255,0.75)",
            borderpad=1,
        )
    low, high = y_range[:2]
    kind = "log" if y_range.is_log else "linear"
    figure.update_yaxes(
        nticks=6, type=kind, range=[math.log10(low), math.log10(high)] if y_range.is_log else [low, high]
    )


def label_row(figure: go.Figure, text: str, top: float, *, color: str | None = None, size: int = FONT_SIZE) -> None:
    """Writes a text at the left of a plot.

    Args:
        figure: gets the text.
        text: as plotly is to show it.
        top: where it begins, on the vertical axis.
        color: None for that of all texts.
        size: of the letters, in pixels.
    """
    figure.add_annotation(
        text=text,
        name="label",
        showarrow=False,
        align="left",
        font={"color": color, "size": size},
        xref="paper",
        x=0,
        xanchor="left",
        xshift=-2,
        yref="y",
        y=top,
        yanchor="top",
        borderpad=0,
    )


def _height(end: LineEnd) -> float:
    return len(wrap(end.text)) * LINE_HEIGHT + _GAP


def _stairs(ends: Sequence[LineEnd], wanted: Sequence[float]) -> list[float]:
    """Moves labels up until each is above all that are further right: no leader crosses a text."""
    found, lowest = [0.0] * len(ends), math.inf
    for index in sorted(range(len(ends)), key=lambda index: (-ends[index].x, -wanted[index])):
        height = _height(ends[index])
        found[index] = min(wanted[index], lowest - height / 2)
        lowest = found[index] - height / 2
    return found


def _inside(centers: Sequence[float], heights: Sequence[float], height: float) -> list[float]:
    """Moves labels that hang out of the plot back into it, and the others along."""
    order = sorted(range(len(centers)), key=centers.__getitem__)
    found = list(centers)
    reached = -TOP / 2
    for index in order:
        found[index] = max(found[index], reached + heights[index] / 2)
        reached = found[index] + heights[index] / 2
    reached = height
    for index in reversed(order):
        found[index] = min(found[index], reached - heights[index] / 2)
        reached = found[index] - heights[index] / 2
    return found
