"""Charts speed-up and efficiency against ranks, beside the ideal, with Amdahl's law fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_commopt.report.baseline import scaling_name
from lightning_commopt.report.figures.plot import Axis, Plot, Point, Trace, extent, linear_axis
from lightning_commopt.report.figures.style import (
    Chart,
    Line,
    PlanStyle,
    ideal_line,
    line_styles,
    line_trace,
)
from lightning_commopt.report.intervals import TIMES, kind_of_interval, spread_text
from lightning_commopt.report.model import Group, Scaling
from lightning_commopt.text.formatting import count, number, percent

_CURVE_POINTS = 40
_MAX_TICKS = 4
_AMDAHL_DASH = "1 3"
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
    ends = [ranks[0], ranks[-1]]
    lines, traces = [], [ideal_line(ends, [num_ranks / base * factors[num_ranks] for num_ranks in ends])]
    for scaling, style in zip(scalings, looks, strict=True):
        name = scaling.sync_method
        if scaling.serial_share is not None and not is_efficiency:
            name += f", f{_SPACE}={_SPACE}{number(scaling.serial_share, 2)}"
            traces.append(_amdahl(scaling.serial_share, ranks[-1], style))
        lines.append(Line(name, style))
        traces.append(_measured(scaling, style, factors, unit))
    margin = 0.05 * (ranks[-1] - ranks[0])
    x = linear_axis([], ends=(ranks[0] - margin, ranks[-1] + margin))
    whole = tuple((value, text) for value, text in x.ticks if value == round(value))
    if len(ranks) <= _MAX_TICKS:
        whole = tuple((float(num_ranks), str(num_ranks)) for num_ranks in ranks)
    plot = Plot(
        x=Axis(low=x.low, high=x.high, ticks=whole),
        y=linear_axis(extent(traces)[1], from_zero=True),
        traces=tuple(traces),
    )
    return Chart(
        title=title,
        note=note,
        x_title="ranks (number of processes)",
        y_title=y_title,
        plot=plot,
        lines=(*lines, Line("ideal", None)),
    )


def _measured(scaling: Scaling, style: PlanStyle, factors: Mapping[int, float], unit: str) -> Trace:
    """Returns the measured points of a plan, its speed-ups multiplied by factors."""
    measured = {n: speedup.scaled(factors[n]) for n, speedup in zip(scaling.num_ranks, scaling.speedups, strict=True)}
    hover = []
    for num_ranks, interval in measured.items():
        text = f"{scaling.sync_method}, {count(num_ranks, 'rank')}: {number(interval.median)} {unit}"
        ends = spread_text(interval)
        hover.append(f"{text}; {kind_of_interval(interval)}: {ends}" if ends else text)
    return line_trace(style, scaling.num_ranks, list(measured.values()), hover)


def _amdahl(serial_share: float, max_ranks: int, style: PlanStyle) -> Trace:
    ranks = [1 + (max_ranks - 1) * at / _CURVE_POINTS for at in range(_CURVE_POINTS + 1)]
    times = {n: serial_share + (1 - serial_share) / n for n in ranks}  # below 0 for a wild fit to few points
    points = tuple(Point(n, 1 / times[n]) for n in ranks if times[n] > 0)
    return Trace(points=points, color=style.color, dash=_AMDAHL_DASH)


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
