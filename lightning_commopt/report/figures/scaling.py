"""Charts speed-up and efficiency against ranks, beside the ideal, with Amdahl's law fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plotly import graph_objects as go

from lightning_commopt.report.baseline import scaling_name
from lightning_commopt.report.figures.style import (
    Chart,
    Line,
    PlanStyle,
    ideal_line,
    line_styles,
    line_trace,
    new_figure,
    plain,
)
from lightning_commopt.report.intervals import TIMES, kind_of_interval, spread_text
from lightning_commopt.report.model import Group, Scaling
from lightning_commopt.text.formatting import count, number, percent

_CURVE_POINTS = 40
_MAX_TICKS = 4
_SPACE = "\N{NO-BREAK SPACE}"


def scaling_charts(group: Group, styles: Mapping[str, PlanStyle]) -> list[Chart]:
    """Returns speed-up and efficiency against ranks; empty if no plan ran on several numbers of ranks.

    They show the scalings over the fewest ranks, which share an axis.
    """
    base = min((scaling.num_ranks[0] for scaling in group.scalings), default=1)
    scalings = [scaling for scaling in group.scalings if scaling.num_ranks[0] == base and len(scaling.num_ranks) > 1]
    if not scalings:
        return []
    sync_methods = {scaling_name(setting, group.settings): setting.sync_method for setting in group.settings}
    looks = line_styles([sync_methods[scaling.sync_method] for scaling in scalings], styles)
    return [_chart(scalings, looks, base, is_efficiency) for is_efficiency in (False, True)]


def _chart(scalings: Sequence[Scaling], looks: Sequence[PlanStyle], base: int, is_efficiency: bool) -> Chart:
    over, divisor = ("one rank", "ranks") if base == 1 else (f"{base} ranks", f"ranks / {base}")
    title, note = "Speed-up against ranks", _amdahl_in_words(scalings, base)
    y_title, unit = f"speed-up over {over} (times)", f"{TIMES} {over}"
    if is_efficiency:
        title, note = "Efficiency against ranks", "100 % would be twice the throughput on twice the ranks."
        y_title, unit = f"efficiency: speed-up divided by {divisor} (%)", "% of the ideal speed-up"
    ranks = sorted({num_ranks for scaling in scalings for num_ranks in scaling.num_ranks})
    factors = {num_ranks: 100 * base / num_ranks if is_efficiency else 1.0 for num_ranks in ranks}
    figure, lines = new_figure(), []
    ends = [ranks[0], ranks[-1]]
    figure.add_trace(ideal_line(ends, [num_ranks / base * factors[num_ranks] for num_ranks in ends]))
    for scaling, style in zip(scalings, looks, strict=True):
        name = scaling.sync_method
        if scaling.serial_share is not None and not is_efficiency:
            name += f", f{_SPACE}={_SPACE}{number(scaling.serial_share, 2)}"
            _draw_amdahl(figure, scaling.serial_share, ranks[-1], style)
        lines.append(Line(name, style))
        figure.add_trace(_measured(scaling, style, factors, unit))
    margin = 0.05 * (ranks[-1] - ranks[0])
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(tickformat="d", range=[ranks[0] - margin, ranks[-1] + margin])
    if len(ranks) <= _MAX_TICKS:
        figure.update_xaxes(tickvals=ranks)
    return Chart(
        title=title,
        note=note,
        x_title="ranks (number of processes)",
        y_title=y_title,
        figure=figure,
        lines=(*lines, Line("ideal", None)),
    )


def _measured(scaling: Scaling, style: PlanStyle, factors: Mapping[int, float], unit: str) -> go.Scatter:
    """Returns the measured points of a plan, its speed-ups multiplied by factors."""
    measured = {n: speedup.scaled(factors[n]) for n, speedup in zip(scaling.num_ranks, scaling.speedups, strict=True)}
    hover = []
    for num_ranks, interval in measured.items():
        text = f"<b>{plain(scaling.sync_method)}, {count(num_ranks, 'rank')}</b><br>{number(interval.median)} {unit}"
        ends = spread_text(interval)
        hover.append(f"{text}<br>{kind_of_interval(interval)}: {ends}" if ends else text)
    return line_trace(style, scaling.num_ranks, list(measured.values()), hover)


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
    known = [(scaling.sync_method, scaling.serial_share) for scaling in scalings if scaling.serial_share is not None]
    if not known:
        ideal = "N times the throughput" if base == 1 else f"N / {base} times the throughput of {base}"
        return f"The dotted straight line is the ideal: N ranks, {ideal}."
    shares = "; ".join(f"{name} {percent(share)}" for name, share in known)
    text = f"Dotted curves: Amdahl's law with f, the part of a one-rank step that more ranks do not shorten: {shares}."
    if any(share > 1 for _, share in known):
        text += " Above 100 %, more ranks are slower than one."
    if any(share < 0 for _, share in known):
        text += " Below 0 %, the speed-up is better than linear."
    return text
