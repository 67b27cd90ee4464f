"""Horizontal bars, each below its name and its numbers: readable at any width, and with any length of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plotly import graph_objects as go

from lightning_commopt.report.figures.labels import LINE_HEIGHT, label_row, plain, wrap
from lightning_commopt.report.figures.style import new_figure

_BAR, _GAP = 15, 14
_MOST_CHARACTERS = 46


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where the bars of a figure are.

    Attributes:
        figure: with the names, but without bars.
        centers: of the bars, on the vertical axis, which is in pixels.
        bar_height: on the same axis.
    """

    figure: go.Figure
    centers: tuple[float, ...]
    bar_height: float = _BAR


def new_rows(names: Sequence[str], values: Sequence[str], *, x_title: str, most: float) -> Rows:
    """Returns a figure with a name and its numbers for each bar.

    Args:
        names: of the bars, from the top.
        values: the numbers, to stand behind the names.
        x_title: name and unit of the axis.
        most: where the axis ends; it begins at 0.
    """
    texts = [_text(name, value) for name, value in zip(names, values, strict=True)]
    heights = [text.count("<br>") * LINE_HEIGHT + LINE_HEIGHT + _BAR + _GAP for text in texts]
    tops = [sum(heights[:at]) for at in range(len(heights) + 1)]
    figure = new_figure(x_title=x_title, y_title=None, plot_height=tops[-1])
    for text, top in zip(texts, tops, strict=False):
        label_row(figure, text, top)
    figure.update_yaxes(range=[tops[-1], 0])
    figure.update_xaxes(range=[0, most or 1.0])
    centers = tuple(bottom - _GAP + 2 - _BAR / 2 for bottom in tops[1:])
    return Rows(figure=figure, centers=centers)


def _text(name: str, value: str) -> str:
    lines = [plain(line) for line in wrap(name, _MOST_CHARACTERS, 2)]
    value = f"<b>{plain(value)}</b>"
    fits = len(name) + len(value) - len("<b></b>") < _MOST_CHARACTERS
    return f"{lines[0]}  {value}" if fits else "<br>".join([*lines, value])
