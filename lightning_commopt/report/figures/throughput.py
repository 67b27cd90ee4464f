"""Throughput and peak memory of all settings, and throughput against bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_commopt.report.figures.chart import Bar, Chart, Line, Part, plain
from lightning_commopt.report.figures.style import PlanStyle, Series, line_styles, line_trace, new_figure, series_of
from lightning_commopt.report.model import Group, Interval, Setting
from lightning_commopt.report.phrases import TIMES, kind_of_interval, kinds_of_intervals, spread_text
from lightning_commopt.text.formatting import byte_unit, number


def throughput(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    found = [(setting, rate) for setting in group.settings if (rate := setting.samples_per_s) is not None]
    if len(found) < 2:
        return None
    most = max(interval.median if interval.high is None else interval.high for _, interval in found)
    bars = []
    for setting, interval in found:
        part = Part(0, interval.median / most, _hover(setting, interval), color=styles[setting.sync_method].color)
        has_ends = interval.low is not None and interval.high is not None
        ends = ((interval.low or 0.0) / most, (interval.high or 0.0) / most) if has_ends else None
        times = f", {number(setting.speedup.median)}{TIMES}" if setting.speedup else ""
        bars.append(Bar(setting.name, f"{number(interval.median)}/s{times}", (part,), ends))
    kinds = kinds_of_intervals(interval for _, interval in found)
    note = f"Medians over repetitions; error bars are {kinds}." if kinds else "A single run of each."
    return Chart(
        title="Throughput of all settings",
        note=f"{note} In the order of the sweep.",
        x_title="throughput over all ranks (samples/s)",
        bars=tuple(bars),
    )


def bucket_sizes(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns throughput against the size of buckets, a line for each plan; None if no plan has two sizes."""
    series = [known for line in series_of(group.settings) if len((known := _known(line)).settings) > 1]
    if not series:
        return None
    looks = line_styles([line.sync_method for line in series], styles)
    figure = new_figure()
    for line, style in zip(series, looks, strict=True):
        intervals = [setting.samples_per_s for setting in line.settings if setting.samples_per_s is not None]
        hover = [_hover(setting, interval) for setting, interval in zip(line.settings, intervals, strict=True)]
        figure.add_trace(
            line_trace(
                style,
                x=[f"{setting.bucket_cap_mb:g}" for setting in line.settings],
                y=[interval.median for interval in intervals],
                error_y={**error_bars(intervals), "color": style.color},
                hovertext=list(map(plain, hover)),
            )
        )
    sizes = sorted({setting.bucket_cap_mb or 0.0 for line in series for setting in line.settings})
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=[f"{size:g}" for size in sizes])
    figure.update_yaxes(rangemode="tozero")
    return Chart(
        title="Throughput against bucket size",
        note="Small buckets start early and cost more calls; one large bucket cannot overlap with backward.",
        x_title="bucket size, bucket_cap_mb (MiB)",
        y_title="throughput over all ranks (samples/s)",
        figure=figure,
        lines=tuple(Line(line.name, style) for line, style in zip(series, looks, strict=True)),
    )


def error_bars(intervals: Sequence[Interval], factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Returns plotly's error bars for the ends of intervals, multiplied by factors."""
    pairs = list(zip(intervals, factors or [1.0] * len(intervals), strict=True))
    return {
        "type": "data",
        "symmetric": False,
        "array": [(point.high - point.median) * by if point.high is not None else 0.0 for point, by in pairs],
        "arrayminus": [(point.median - point.low) * by if point.low is not None else 0.0 for point, by in pairs],
        "visible": any(point.low is not None for point in intervals),
        "thickness": 1.4,
        "width": 4,
    }


def _known(series: Series) -> Series:
    """Returns the settings whose size of buckets is a number above 0."""
    kept = {s.bucket_cap_mb: s for s in series.settings if (s.bucket_cap_mb or 0) > 0 and s.samples_per_s is not None}
    return replace(series, settings=tuple(kept.values()))


def _hover(setting: Setting, interval: Interval) -> str:
    ends = "a single run, no interval"
    if interval.low is not None:
        ends = f"{kind_of_interval(interval)}: {spread_text(interval)}"
    text = f"{setting.name}: {number(interval.median, 4)} samples/s; {ends}"
    return f"{text}; {number(setting.speedup.median)}{TIMES} the baseline" if setting.speedup else text


def peak_memory(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    found = [(setting, peak) for setting in group.settings if (peak := setting.peak_memory_bytes) is not None]
    if len(found) < 2:
        return None
    most = max(peak_bytes for _, peak_bytes in found)
    unit = byte_unit(most)
    bars = []
    for setting, peak_bytes in found:
        text = unit.text(peak_bytes)
        part = Part(0, peak_bytes / most, f"{setting.name}: {text}", color=styles[setting.sync_method].color)
        bars.append(Bar(setting.name, text, (part,)))
    return Chart(
        title="Peak memory",
        note="On a GPU what PyTorch had allocated, else what the process held. In the order of the sweep.",
        x_title=f"peak memory of the rank that needs most ({unit.name})",
        bars=tuple(bars),
    )
