"""Charts what each setting costs: throughput, also against bucket size; a step's parts and overlap; memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_commopt.measure.runs.settings import Value
from lightning_commopt.measure.statistics import step_parts as split_step
from lightning_commopt.report.choices import canonical
from lightning_commopt.report.figures.plot import Plot, category_axis, extent, linear_axis
from lightning_commopt.report.figures.style import (
    Bar,
    Chart,
    Key,
    Line,
    Part,
    PlanStyle,
    ends_of,
    line_styles,
    line_trace,
)
from lightning_commopt.report.intervals import TIMES, Interval, kind_of_interval, kinds_of_intervals, spread_text
from lightning_commopt.report.model import Group, Setting
from lightning_commopt.report.names import distinct_name
from lightning_commopt.text.formatting import Unit, byte_unit, number, percent, time_unit

_PARTS = (
    Key("computing", "computing"),
    Key("hidden", "computing while gradients travel"),
    Key("exposed", "exposed: waiting for gradients"),
)
_MEASURED = {"step_s", "comm_s", "exposed_s"}
_MIN_SHARE = 1e-6  # a smaller share of a step is a rounding error


def throughput(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two."""
    rates = [(setting, rate) for setting in group.settings if (rate := setting.samples_per_s) is not None]
    if len(rates) < 2:
        return None
    most = max(interval.median if interval.high is None else interval.high for _, interval in rates)
    bars = []
    for setting, interval in rates:
        part = Part(0, interval.median / most, _hover(setting, interval), color=styles[setting.sync_method].color)
        ends = ends_of(interval.scaled(1 / most))
        times = f", {number(setting.speedup.median)}{TIMES}" if setting.speedup else ""
        bars.append(Bar(setting.name, f"{number(interval.median)}/s{times}", (part,), ends))
    kinds = kinds_of_intervals(interval for _, interval in rates)
    note = f"Medians over repetitions; error bars are {kinds}." if kinds else "Each setting was measured once."
    return Chart(
        title="Throughput of all settings",
        note=f"{note} In the order of the sweep.",
        x_title="throughput over all ranks (samples/s)",
        bars=tuple(bars),
    )


def bucket_sizes(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns throughput against the size of buckets, a line for each plan; None if no plan has two sizes."""
    series = _by_bucket_size(group.settings)
    if not series:
        return None
    looks = line_styles([next(iter(by_size.values())).sync_method for by_size in series.values()], styles)
    sizes = sorted({size for by_size in series.values() for size in by_size})
    traces = []
    for by_size, style in zip(series.values(), looks, strict=True):
        rates = {setting.name: rate for setting in by_size.values() if (rate := setting.samples_per_s) is not None}
        hover = [_hover(setting, rates[setting.name]) for setting in by_size.values()]
        traces.append(line_trace(style, [sizes.index(size) for size in by_size], list(rates.values()), hover))
    plot = Plot(
        x=category_axis([f"{size:g}" for size in sizes]),
        y=linear_axis(extent(traces)[1], from_zero=True),
        traces=tuple(traces),
    )
    return Chart(
        title="Throughput against bucket size",
        note="Small buckets start early and cost more calls; one large bucket cannot overlap with backward.",
        x_title="bucket size, bucket_cap_mb (MiB)",
        y_title="throughput over all ranks (samples/s)",
        plot=plot,
        lines=tuple(map(Line, series, looks)),
    )


def _by_bucket_size(settings: Sequence[Setting]) -> dict[str, dict[float, Setting]]:
    """Returns settings that differ only in the size of their buckets: for each unique name, the settings by size."""
    by_values: dict[tuple[object, ...], dict[float, Setting]] = {}
    for setting in settings:
        key = setting.sync_method, setting.world_size, *sorted(_without_bucket_size(setting).items())
        by_size = by_values.setdefault(key, {})
        if setting.bucket_cap_mb and setting.bucket_cap_mb > 0 and setting.samples_per_s is not None:
            by_size[setting.bucket_cap_mb] = setting
    values = [setting.values for setting in settings]
    names = {}
    for by_size in by_values.values():
        if len(by_size) > 1:
            first = next(iter(by_size.values()))
            name = distinct_name(_without_bucket_size(first), values, first.sync_method)
            names[name] = dict(sorted(by_size.items()))
    return names


def _without_bucket_size(setting: Setting) -> dict[str, Value]:
    return {name: value for name, value in setting.values.items() if canonical(name) != "bucket_cap_mb"}


def _hover(setting: Setting, interval: Interval) -> str:
    ends = "measured once, no interval"
    if interval.low is not None:
        ends = f"{kind_of_interval(interval)}: {spread_text(interval)}"
    text = f"{setting.name}: {number(interval.median, 4)} samples/s; {ends}"
    return f"{text}; {number(setting.speedup.median)}{TIMES} the baseline" if setting.speedup else text


def peak_memory(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a bar for each setting; None with fewer than two. With PYTORCH_NO_CUDA_MEMORY_CACHING torch counts 0."""
    peaks = [(setting, peak) for setting in group.settings if (peak := setting.peak_memory_bytes)]
    if len(peaks) < 2:
        return None
    most = max(peak_bytes for _, peak_bytes in peaks)
    unit = byte_unit(most)
    bars = []
    for setting, peak_bytes in peaks:
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
    """A setting's step in parts: seconds of computing alone, of both, and of communicating alone."""

    setting: Setting
    parts: tuple[float, float, float]
    comm_s: float
    share: float

    @property
    def step_s(self) -> float:
        return sum(self.parts)

    @property
    def hidden_s(self) -> float:
        return self.parts[1]

    @property
    def bound_s(self) -> float:
        """The most that overlap can hide."""
        computing_s, hidden_s, _ = self.parts
        return max(hidden_s, min(computing_s + hidden_s, self.comm_s))


def step_parts(group: Group) -> Chart | None:
    """Returns a stacked bar for each setting, the longest waits first; None without records of steps."""
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
    steps = sorted((step for step in _steps(group) if step.comm_s > 0), key=lambda step: -step.hidden_s)
    if not steps:
        return None
    max_s = max(step.bound_s for step in steps)
    unit = time_unit(max_s)
    bars = []
    for step in steps:
        saved = f"{unit.text(step.hidden_s)} of {unit.text(step.bound_s)}"
        hover = (
            f"{step.setting.name}: communication {unit.text(step.comm_s)}, exposed {unit.text(step.parts[2])};"
            f" saved by overlap {saved}"
        )
        parts = (
            Part(0, step.bound_s / max_s, hover, "bound"),
            Part(0, step.hidden_s / max_s, hover, color=styles[step.setting.sync_method].color),
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
    steps = []
    for setting in group.settings:
        runs = [run.record.comm_time for run in setting.runs if run.record.comm_time.keys() >= _MEASURED]
        if runs and setting.exposed_share is not None and setting.comm_s is not None:
            computing_s, hidden_s, exposed_s = split_step(runs)
            hidden_s = hidden_s if hidden_s > _MIN_SHARE * computing_s else 0.0
            parts = computing_s, hidden_s, exposed_s
            steps.append(_Step(setting, parts, setting.comm_s.median, setting.exposed_share.median))
    return steps
