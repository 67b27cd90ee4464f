"""What more ranks bring: speed-up and efficiency beside the ideal, and Amdahl's law fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plotly import graph_objects as go

from lightning_commopt.report.figures.chart import Chart
from lightning_commopt.report.figures.labels import LineEnd, Range, label_ends, plain, plot_height, right_margin
from lightning_commopt.report.figures.style import QUIET, PlanStyle, line_styles, new_figure
from lightning_commopt.report.figures.throughput import error_bars
from lightning_commopt.report.figures.units import TIMES, number, percent, spread_text
from lightning_commopt.report.model import Group, Scaling
from lightning_commopt.report.phrases import kind_of_interval
from lightning_commopt.report.scaling import scaling_name

_CURVE_POINTS = 40
_SPACE = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """What is shown of the speed-ups.

    Attributes:
        title: name and unit.
        unit: behind a number.
        base: ranks that the speed-ups are over.
        factor: what to show the speed-up on so many ranks times.
        has_law: whether Amdahl's curves are drawn.
    """

    title: str
    unit: str
    base: int
    factor: Callable[[int], float]
    has_law: bool = False


def speedup(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns speed-up against ranks; None where no plan was run on several numbers of ranks."""
    scalings, base = _shown(group)
    if not scalings:
        return None
    over = "one rank" if base == 1 else f"{base} ranks"
    axis = _Axis(
        title=f"speed-up over {over} (times)",
        unit=f"{TIMES} {over}",
        base=base,
        factor=lambda ranks: 1.0,
        has_law=True,
    )
    figure = _figure(scalings, _looks(scalings, group, styles), axis)
    return Chart(title="Speed-up against ranks", note=_amdahl_in_words(scalings, base), figure=figure)


def efficiency(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns what of the ideal speed-up is reached; None where no plan was run on several numbers of ranks."""
    scalings, base = _shown(group)
    if not scalings:
        return None
    times = "ranks" if base == 1 else f"ranks / {base}"
    axis = _Axis(
        title=f"efficiency: speed-up divided by {times} (%)",
        unit="% of the ideal speed-up",
        base=base,
        factor=lambda ranks: 100 * base / ranks,
    )
    figure = _figure(scalings, _looks(scalings, group, styles), axis)
    note = "100 % would be twice the throughput on twice the ranks."
    return Chart(title="Efficiency against ranks", note=note, figure=figure)


def _shown(group: Group) -> tuple[list[Scaling], int]:
    """Returns the scalings over the fewest ranks, as one axis is over one number of ranks; and that number."""
    base = min((scaling.num_ranks[0] for scaling in group.scalings), default=1)
    return [each for each in group.scalings if each.num_ranks[0] == base and len(each.num_ranks) > 1], base


def _looks(scalings: Sequence[Scaling], group: Group, styles: Mapping[str, PlanStyle]) -> list[PlanStyle]:
    plan_names = {scaling_name(setting, group.settings): setting.plan_name for setting in group.settings}
    return line_styles([plan_names[scaling.plan_name] for scaling in scalings], styles)


def _figure(scalings: Sequence[Scaling], looks: Sequence[PlanStyle], axis: _Axis) -> go.Figure:
    ranks = sorted({num_ranks for scaling in scalings for num_ranks in scaling.num_ranks})
    ideal = [at / axis.base * axis.factor(at) for at in (ranks[0], ranks[-1])]
    ends = [_end(scaling, style, axis) for scaling, style in zip(scalings, looks, strict=True)]
    ends.append(LineEnd(ranks[-1], ideal[-1], "ideal", QUIET))
    figure = new_figure(
        x_title="ranks (number of processes)",
        y_title=axis.title,
        plot_height=plot_height(ends),
        right=right_margin(ends),
    )
    ideal_line = {"color": QUIET, "dash": "2px,4px", "width": 1.4}
    figure.add_scatter(mode="lines", x=[ranks[0], ranks[-1]], y=ideal, line=ideal_line, hoverinfo="skip")
    for scaling, style in zip(scalings, looks, strict=True):
        if scaling.serial_share is not None and axis.has_law:
            _draw_amdahl(figure, scaling.serial_share, ranks[-1], style)
        _draw(figure, scaling, style, axis)
    tops = [
        (interval.high or interval.median) * axis.factor(num_ranks)
        for scaling in scalings
        for num_ranks, interval in zip(scaling.num_ranks, scaling.speedups, strict=True)
    ]
    label_ends(figure, ends, Range(0, max(*ideal, *tops) * 1.05))
    margin = 0.05 * (ranks[-1] - ranks[0])
    figure.update_xaxes(tickvals=ranks, range=[ranks[0] - margin, ranks[-1] + margin])
    return figure


def _end(scaling: Scaling, style: PlanStyle, axis: _Axis) -> LineEnd:
    name = scaling.plan_name
    if scaling.serial_share is not None and axis.has_law:
        name += f", f{_SPACE}={_SPACE}{number(scaling.serial_share, 2)}"
    ranks = scaling.num_ranks[-1]
    return LineEnd(ranks, scaling.speedups[-1].median * axis.factor(ranks), name, style.text_color)


def _draw(figure: go.Figure, scaling: Scaling, style: PlanStyle, axis: _Axis) -> None:
    """Draws the measured points of a plan."""
    factors = [axis.factor(ranks) for ranks in scaling.num_ranks]
    points = list(zip(scaling.num_ranks, scaling.speedups, factors, strict=True))
    figure.add_scatter(
        mode="lines+markers",
        x=scaling.num_ranks,
        y=[interval.median * factor for _, interval, factor in points],
        line={"color": style.color, "dash": style.dash, "width": 2.2},
        marker={"color": style.color, "symbol": style.symbol, "size": 9},
        error_y={**error_bars(scaling.speedups, factors), "color": style.color},
        hovertext=[
            f"<b>{plain(scaling.plan_name)}, {ranks} rank{'s' * (ranks > 1)}</b><br>"
            f"{number(interval.median * factor)} {axis.unit}"
            + (f"<br>{kind_of_interval(interval)}: {spread_text(interval, factor)}" if interval.low is not None else "")
            for ranks, interval, factor in points
        ],
        hoverinfo="text",
    )


def _draw_amdahl(figure: go.Figure, serial_share: float, most_ranks: int, style: PlanStyle) -> None:
    ranks = [1 + (most_ranks - 1) * at / _CURVE_POINTS for at in range(_CURVE_POINTS + 1)]
    times = {n: serial_share + (1 - serial_share) / n for n in ranks}  # below 0 for a wild fit to few points
    figure.add_scatter(
        mode="lines",
        x=[n for n in ranks if times[n] > 0],
        y=[1 / times[n] for n in ranks if times[n] > 0],
        line={"color": style.color, "dash": "1px,3px", "width": 2},
        hoverinfo="skip",
    )


def _amdahl_in_words(scalings: Sequence[Scaling], base: int) -> str:
    known = [(each.plan_name, each.serial_share) for each in scalings if each.serial_share is not None]
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
