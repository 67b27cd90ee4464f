"""Chart: a figure with the words that belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from plotly import graph_objects as go

Swatch = Literal["computing", "hidden", "exposed", "bound", "waiting", "compressing", "wire", "stalled"]


class Key(NamedTuple):
    """What one of the shades of a chart means, to be said right above it.

    Attributes:
        swatch: which shade.
        text: what it means.
    """

    swatch: Swatch
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart.

    Attributes:
        title: what it shows.
        note: how to read it; a sentence or two, plain text.
        figure: for plotly.
        keys: shades that the chart itself does not name.
    """

    title: str
    note: str
    figure: go.Figure
    keys: tuple[Key, ...] = ()
