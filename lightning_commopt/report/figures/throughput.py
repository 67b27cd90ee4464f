"""How fast the settings are, and what the size of their buckets does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from plotly import graph_objects as go

from lightning_commopt.report.figures.chart import Chart
from lightning_commopt.report.figures.labels import (
    LineEnd,
    Range,
    label_ends,
    plain,
    plot_height,
    right_margin,
)
from lightning_commopt.report.figures.rows import new_rows
from lightning_commopt.report.figures.series import Series, series_of
from lightning_commopt.report.figures.style import INK, PlanStyle, line_styles, new_figure
from lightning_commopt.report.figures.units import TIMES, number, spread_text
from lightning_commopt.report.model import Group, Interval, Setting
from lightning_commopt.report.phrases import kind_of_interval, kinds_of_intervals

_LEAST_TICK_DISTANCE = 0.09


def throughput(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    found = [(each, each.samples_per_s) for each in group.settings if each.samples_per_s is not None]
    if len(found) < 2:
        return None
    most = max(_top(interval) for _, interval in found)
    rows = new_rows(
        [setting.name for setting, _ in found],
        [_words(setting, interval) for setting, interval in found],
        x_title="throughput over all ranks (samples/s)",
        most=most,
    )
    rows.figure.add_bar(
        orientation="h",
        x=[interval.median for _, interval in found],
        y=rows.centers,
        width=rows.bar_height,
        marker={"color": [styles[setting.plan_name].color for setting, _ in found]},
        error_x={**error_bars([interval for _, interval in found]), "color": INK},
        hovertext=[_hover(setting, interval) for setting, interval in found],
        hoverinfo="text",
    )
    kinds = kinds_of_intervals(interval for _, interval in found)
    note = f"Medians over repetitions; error bars are {kinds}." if kinds else "A single run of each."
    return Chart(title="Throughput of all settings", note=f"{note} In the order of the sweep.", figure=rows.figure)


def bucket_sizes(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns throughput against the size of buckets, a line for each way; None where no way has two sizes."""
    lines = [line for each in series_of(group.settings) if len((line := _known(each)).settings) > 1]
    if not lines:
        return None
    looks = line_styles([line.plan_name for line in lines], styles)
    ends = [_end(line, style) for line, style in zip(lines, looks, strict=True)]
    figure = new_figure(
        x_title="bucket size, bucket_cap_mb (MiB), logarithmic",
        y_title="throughput over all ranks (samples/s)",
        plot_height=plot_height(ends),
        right=right_margin(ends),
    )
    for line, style in zip(lines, looks, strict=True):
        _draw(figure, line, style)
    most = max(_top(setting.samples_per_s) for line in lines for setting in line.settings)
    label_ends(figure, ends, Range(0, most * 1.05), x_is_log=True)
    sizes = sorted({setting.bucket_cap_mb or 0.0 for line in lines for setting in line.settings})
    ticks = _ticks(sizes)
    margin = 0.04 * (log10(sizes[-1]) - log10(sizes[0]))
    figure.update_xaxes(
        type="log",
        range=[log10(sizes[0]) - margin, log10(sizes[-1]) + margin],
        tickvals=ticks,
        ticktext=[f"{size:,g}" for size in ticks],
        tickangle=0,
    )
    note = "Small buckets start early and cost more calls; one large bucket cannot overlap with backward."
    return Chart(title="Throughput against bucket size", note=note, figure=figure)


def error_bars(intervals: Sequence[Interval], factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Returns plotly's error bars of intervals; of those without ends, none.

    Args:
        intervals: of the points.
        factors: what each point is shown times; None for 1.
    """
    pairs = list(zip(intervals, factors or [1.0] * len(intervals), strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [(each.high - each.median) * factor if each.high is not None else 0.0 for each, factor in pairs],
        "arrayminus": [(each.median - each.low) * factor if each.low is not None else 0.0 for each, factor in pairs],
        "visible": any(each.low is not None for each in intervals),
        "thickness": 1.4,
        "width": 4,
    }


def _known(series: Series) -> Series:
    """Returns the settings that can stand on a logarithmic axis."""
    kept = {s.bucket_cap_mb: s for s in series.settings if (s.bucket_cap_mb or 0) > 0 and s.samples_per_s is not None}
    return Series(name=series.name, plan_name=series.plan_name, settings=tuple(kept.values()))


def _draw(figure: go.Figure, line: Series, style: PlanStyle) -> None:
    intervals = [setting.samples_per_s for setting in line.settings if setting.samples_per_s is not None]
    figure.add_scatter(
        mode="lines+markers",
        x=[setting.bucket_cap_mb for setting in line.settings],
        y=[interval.median for interval in intervals],
        line={"color": style.color, "dash": style.dash, "width": 2.2},
        marker={"color": style.color, "symbol": style.symbol, "size": 9},
        error_y={**error_bars(intervals), "color": style.color},
        hovertext=[_hover(setting, each) for setting, each in zip(line.settings, intervals, strict=True)],
        hoverinfo="text",
    )


def _end(line: Series, style: PlanStyle) -> LineEnd:
    last = line.settings[-1]
    assert last.samples_per_s is not None
    return LineEnd(last.bucket_cap_mb or 0.0, last.samples_per_s.median, line.name, style.text_color)


def _ticks(sizes: Sequence[float]) -> list[float]:
    """Returns those that can be written below a logarithmic axis without touching each other; the ends always."""
    least = _LEAST_TICK_DISTANCE * log10(sizes[-1] / sizes[0]) if sizes[0] < sizes[-1] else 0.0
    kept = [sizes[-1]]
    for size in reversed(sizes[:-1]):
        if log10(kept[-1] / size) >= least and (size == sizes[0] or log10(size / sizes[0]) >= least):
            kept.append(size)
    return kept[::-1]


def _top(interval: Interval | None) -> float:
    assert interval is not None
    return interval.median if interval.high is None else interval.high


def _words(setting: Setting, interval: Interval) -> str:
    times = f", {number(setting.speedup.median)}{TIMES}" if setting.speedup else ""
    return f"{number(interval.median)}/s{times}"


def _hover(setting: Setting, interval: Interval) -> str:
    lines = [
        f"<b>{plain(setting.name)}</b>",
        f"{number(interval.median, 4)} samples/s",
        f"{kind_of_interval(interval)}: {spread_text(interval)}"
        if interval.low is not None
        else "a single run, no interval",
        f"{number(setting.speedup.median)}{TIMES} the reference: {setting.difference}" if setting.speedup else "",
    ]
    return "<br>".join(line for line in lines if line)
