"""What each setting costs: throughput, against bucket size as well; the parts of a step and their overlap; memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning_commopt.measure.exposed_share import StepParts
from lightning_commopt.measure.exposed_share import step_parts as split_step
from lightning_commopt.report.figures.style import (
    Bar,
    Chart,
    Key,
    Line,
    Part,
    PlanStyle,
    Series,
    line_styles,
    line_trace,
    new_figure,
    plain,
    series_of,
)
from lightning_commopt.report.model import Group, Interval, Setting
from lightning_commopt.report.phrases import TIMES, kind_of_interval, kinds_of_intervals, spread_text
from lightning_commopt.text.formatting import Unit, byte_unit, number, percent, time_unit

_PARTS = (
    Key("computing", "computing"),
    Key("hidden", "computing while gradients travel"),
    Key("exposed", "exposed: waiting for gradients"),
)
_MEASURED = {"step_s", "comm_s", "exposed_s"}
_MIN_SHARE = 1e-6  # of a step; less is what rounding left


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


class _Step(NamedTuple):
    """A setting's step in parts."""

    setting: Setting
    parts: StepParts
    comm_s: float
    share: float

    @property
    def step_s(self) -> float:
        return sum(self.parts)

    @property
    def bound_s(self) -> float:
        """The most that overlap can hide."""
        return max(self.parts.hidden_s, min(self.step_s - self.parts.exposed_s, self.comm_s))


def step_parts(group: Group) -> Chart | None:
    """Returns a stacked bar for each setting, those that wait most first; None without records of steps."""
    steps = sorted(_steps(group), key=lambda step: -step.share)
    if not steps:
        return None
    max_s = max(step.step_s for step in steps)
    unit = time_unit(max_s)
    return Chart(
        title="Exposed communication",
        note="Where the time of a step goes: the mean over steps and ranks. The settings that wait most come first.",
        x_title=f"time of a step ({unit.name})",
        bars=tuple(
            Bar(step.setting.name, f"{percent(step.share)} exposed", _parts(step, max_s, unit)) for step in steps
        ),
        keys=_PARTS,
    )


def _parts(step: _Step, max_s: float, unit: Unit) -> tuple[Part, ...]:
    parts, start_s = [], 0.0
    for key, part_s in zip(_PARTS, step.parts, strict=True):
        hover = f"{step.setting.name}: {key.text}, {unit.text(part_s)} of {unit.text(step.step_s)}"
        parts.append(Part(start_s / max_s, (start_s + part_s) / max_s, hover, key.swatch))
        start_s += part_s
    return tuple(parts)


def overlap(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns the time that overlap saves beside its bound; None without communication."""
    steps = sorted((step for step in _steps(group) if step.comm_s > 0), key=lambda step: -step.parts.hidden_s)
    if not steps:
        return None
    max_s = max(step.bound_s for step in steps)
    unit = time_unit(max_s)
    bars = []
    for step in steps:
        saved = f"{unit.text(step.parts.hidden_s)} of {unit.text(step.bound_s)}"
        hover = (
            f"{step.setting.name}: communication {unit.text(step.comm_s)}, exposed {unit.text(step.parts.exposed_s)};"
            f" saved by overlap {saved}"
        )
        parts = (
            Part(0, step.bound_s / max_s, hover, "bound"),
            Part(0, step.parts.hidden_s / max_s, hover, color=styles[step.setting.sync_method].color),
        )
        bars.append(Bar(step.setting.name, saved, parts))
    return Chart(
        title="Time saved by overlap",
        note="How much of the communication backward hides.",
        x_title=f"time saved by overlap, of a step ({unit.name})",
        bars=tuple(bars),
        keys=(Key("bound", "the most that can be saved: the computing, or the communication, whichever is shorter"),),
    )


def _steps(group: Group) -> list[_Step]:
    """Returns the steps of the settings whose communication was observed."""
    found = []
    for setting in group.settings:
        runs = [run.record.comm_time for run in setting.runs if run.record.comm_time.keys() >= _MEASURED]
        if runs and setting.exposed_share is not None and setting.comm_s is not None:
            computing_s, hidden_s, exposed_s = split_step(runs)
            hidden_s = hidden_s if hidden_s > _MIN_SHARE * computing_s else 0.0
            parts = StepParts(computing_s, hidden_s, exposed_s)
            found.append(_Step(setting, parts, setting.comm_s.median, setting.exposed_share.median))
    return found
