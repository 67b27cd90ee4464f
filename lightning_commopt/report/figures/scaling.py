"""Speed-up and efficiency against ranks, beside the ideal, and Amdahl's law fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from plotly import graph_objects as go

from lightning_commopt.report.baseline import scaling_name
from lightning_commopt.report.figures.style import (
    QUIET,
    Chart,
    Line,
    PlanStyle,
    line_styles,
    line_trace,
    new_figure,
    plain,
)
from lightning_commopt.report.figures.throughput import error_bars
from lightning_commopt.report.model import Group, Scaling
from lightning_commopt.report.phrases import TIMES, kind_of_interval, spread_text
from lightning_commopt.text.formatting import number, percent

_CURVE_POINTS = 40
_MAX_TICKS = 4
_SPACE = "\N{NO-BREAK SPACE}"


class _Axis(NamedTuple):
    """A way to show speed-ups: over how many ranks, what to multiply them by, and whether to draw Amdahl's curves."""

    title: str
    unit: str
    base: int
    factor: Callable[[int], float]
    has_law: bool


def scaling_charts(group: Group, styles: Mapping[str, PlanStyle]) -> list[Chart]:
    """Returns speed-up and efficiency against ranks; empty if no plan ran on several numbers of ranks.

    They show the scalings over the fewest ranks, which share an axis.
    """
    base = min((scaling.num_ranks[0] for scaling in group.scalings), default=1)
    scalings = [found for found in group.scalings if found.num_ranks[0] == base and len(found.num_ranks) > 1]
    if not scalings:
        return []
    over, divisor = ("one rank", "ranks") if base == 1 else (f"{base} ranks", f"ranks / {base}")
    title, unit = f"speed-up over {over} (times)", f"{TIMES} {over}"
    speedup = _Axis(title, unit, base, factor=lambda ranks: 1.0, has_law=True)
    title, unit = f"efficiency: speed-up divided by {divisor} (%)", "% of the ideal speed-up"
    efficiency = _Axis(title, unit, base, factor=lambda ranks: 100 * base / ranks, has_law=False)
    note = "100 % would be twice the throughput on twice the ranks."
    charts = {
        "Speed-up against ranks": (speedup, _amdahl_in_words(scalings, base)),
        "Efficiency against ranks": (efficiency, note),
    }
    sync_methods = {scaling_name(setting, group.settings): setting.sync_method for setting in group.settings}
    looks = line_styles([sync_methods[scaling.sync_method] for scaling in scalings], styles)
    return [
        Chart(
            title=chart_title,
            note=chart_note,
            x_title="ranks (number of processes)",
            y_title=axis.title,
            figure=_figure(scalings, looks, axis),
            lines=(
                *(Line(_name(scaling, axis), style) for scaling, style in zip(scalings, looks, strict=True)),
                Line("ideal", None),
            ),
        )
        for chart_title, (axis, chart_note) in charts.items()
    ]


def _figure(scalings: Sequence[Scaling], looks: Sequence[PlanStyle], axis: _Axis) -> go.Figure:
    ranks = sorted({num_ranks for scaling in scalings for num_ranks in scaling.num_ranks})
    ideal = [at / axis.base * axis.factor(at) for at in (ranks[0], ranks[-1])]
    figure = new_figure()
    ideal_line = {"color": QUIET, "dash": "2px,4px", "width": 1.4}
    figure.add_scatter(mode="lines", x=[ranks[0], ranks[-1]], y=ideal, line=ideal_line, hoverinfo="skip")
    for scaling, style in zip(scalings, looks, strict=True):
        if scaling.serial_share is not None and axis.has_law:
            _draw_amdahl(figure, scaling.serial_share, ranks[-1], style)
        _draw(figure, scaling, style, axis)
    margin = 0.05 * (ranks[-1] - ranks[0])
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(tickformat="d", range=[ranks[0] - margin, ranks[-1] + margin])
    if len(ranks) <= _MAX_TICKS:
        figure.update_xaxes(tickvals=ranks)
    return figure


def _name(scaling: Scaling, axis: _Axis) -> str:
    if scaling.serial_share is None or not axis.has_law:
        return scaling.sync_method
    return f"{scaling.sync_method}, f{_SPACE}={_SPACE}{number(scaling.serial_share, 2)}"


def _draw(figure: go.Figure, scaling: Scaling, style: PlanStyle, axis: _Axis) -> None:
    """Draws the measured points of a plan."""
    factors = [axis.factor(ranks) for ranks in scaling.num_ranks]
    points = list(zip(scaling.num_ranks, scaling.speedups, factors, strict=True))
    figure.add_trace(
        line_trace(
            style,
            x=scaling.num_ranks,
            y=[interval.median * factor for _, interval, factor in points],
            error_y={**error_bars(scaling.speedups, factors), "color": style.color},
            hovertext=[
                f"<b>{plain(scaling.sync_method)}, {ranks} rank{'s' * (ranks > 1)}</b><br>"
                f"{number(interval.median * factor)} {axis.unit}"
                + (
                    f"<br>{kind_of_interval(interval)}: {spread_text(interval, factor)}"
                    if interval.low is not None
                    else ""
                )
                for ranks, interval, factor in points
            ],
        )
    )


def _draw_amdahl(figure: go.Figure, serial_share: float, max_ranks: int, style: PlanStyle) -> None:
    ranks = [1 + (max_ranks - 1) * at / _CURVE_POINTS for at in range(_CURVE_POINTS + 1)]
    times = {n: serial_share + (1 - serial_share) / n for n in ranks}  # below 0 for a wild fit to few points
    figure.add_scatter(
        mode="lines",
        x=[n for n in ranks if times[n] > 0],
        y=[1 / times[n] for n in ranks if times[n] > 0],
        line={"color": style.color, "dash": "1px,3px", "width": 2},
        hoverinfo="skip",
    )


def _amdahl_in_words(scalings: Sequence[Scaling], base: int) -> str:
    known = [(found.sync_method, found.serial_share) for found in scalings if found.serial_share is not None]
    if not known:
        ideal = "N times the throughput" if base == 1 else f"N / {base} times the throughput of {base}"
        return f"The dotted straight line is the ideal: N ranks, {ideal}."
    shares = "; ".join(f"{name} {percent(share)}" for name, share in known)
    text = f"Dotted curves: Amdahl's law with f, the part of a one-rank step that more ranks do not shorten: {shares}."
    if any(share > 1 for _, share in known):
        text += " Above 100 %, more ranks are slower than one."
    if any(share < 0 for _, share in known):
        text += " Below 0 %, more ranks are worth more than their number."
    return text
