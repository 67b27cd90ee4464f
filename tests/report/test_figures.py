"""What the charts show: the report's numbers, named where they are, in the look of their plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt.measure.files import rank_file
from lightning_commopt.measure.runs.losses import LossPoint
from lightning_commopt.report.build import build_report
from lightning_commopt.report.figures.decision import WITHOUT_LOSS, decision
from lightning_commopt.report.figures.loss import MAX_CURVES, loss_curves
from lightning_commopt.report.figures.plot import Plot, Trace, extent, linear_axis, log_axis
from lightning_commopt.report.figures.scaling import scaling_charts
from lightning_commopt.report.figures.style import Chart, PlanStyle, plan_styles, typical_run
from lightning_commopt.report.figures.throughput import bucket_sizes, overlap, peak_memory, step_parts, throughput
from lightning_commopt.report.figures.timeline import MAX_SETTINGS, timelines, typical_steps
from lightning_commopt.report.model import Group, Report
from lightning_commopt.report.page import sections, write_page
from support.known import known
from support.sample_runs import SampleRun, save_run, write_run


def _styles(report: Report) -> dict[str, PlanStyle]:
    return plan_styles(setting.sync_method for group in report.groups for setting in group.settings)


def _plot(chart: Chart | None) -> Plot:
    return known(known(chart).plot)


def _x(trace: Trace) -> list[float]:
    return [point.x for point in trace.points]


def _y(trace: Trace) -> list[float]:
    return [point.y for point in trace.points]


def _names(chart: Chart | None) -> list[str]:
    """Returns what a chart says outside of its plot: names of bars, or of lines."""
    return [bar.name for bar in known(chart).bars] or [line.name for line in known(chart).lines]


def _with(group: Group, **changes: Any) -> Group:
    """Returns a group whose settings have something else."""
    settings = tuple(replace(setting, **changes) for setting in group.settings)
    return replace(group, settings=settings, baseline=settings[0], fastest=settings[0])


def _with_losses(report: Report, losses: list[float]) -> Group:
    """Returns a group of the first setting alone, with one run that has these training losses."""
    points = tuple(LossPoint(kind="train", step=at, seconds=float(at), loss=loss) for at, loss in enumerate(losses))
    first = report.groups[0].settings[0]
    return replace(report.groups[0], settings=(replace(first, runs=(replace(first.runs[0], losses=points),)),))


def test_bars_have_the_medians_and_intervals(sweep: Report) -> None:
    group = sweep.groups[0]
    chart = known(throughput(group, _styles(sweep)))
    intervals = [setting.samples_per_s for setting in group.settings if setting.samples_per_s is not None]
    most = max(interval.high or 0 for interval in intervals)
    assert [bar.parts[0].end for bar in chart.bars] == pytest.approx([interval.median / most for interval in intervals])
    assert [bar.interval for bar in chart.bars] == [
        pytest.approx(((interval.low or 0) / most, (interval.high or 0) / most)) for interval in intervals
    ]
    assert _names(chart) == [setting.name for setting in group.settings]


def test_bucket_sizes_have_a_line_for_each_plan(sweep: Report) -> None:
    group = sweep.groups[0]
    chart = bucket_sizes(group, _styles(sweep))
    assert [_x(line) for line in _plot(chart).traces] == [[0, 1]] * 4
    assert _plot(chart).x.ticks == ((0, "25"), (1, "100"))
    rates = {(setting.sync_method, setting.bucket_cap_mb): setting.samples_per_s for setting in group.settings}
    none = _plot(chart).traces[0].points[1]
    interval = known(rates["none", 100.0])
    assert (none.y, none.y_ends) == (interval.median, (interval.low, interval.high))
    assert len(set(_names(chart))) == 4


def test_a_bucket_size_of_none_has_no_place_on_the_axis(tmp_path: Path) -> None:
    """Lightning's DDP takes 0 for a bucket for each gradient."""
    for size in (0, 5, 25):
        save_run(tmp_path / str(size), f"trainer.strategy.bucket_cap_mb={size}", plan=None, samples_per_s=1.0)
    report = build_report([tmp_path])
    plot = _plot(bucket_sizes(report.groups[0], _styles(report)))
    assert [text for _, text in plot.x.ticks] == ["5", "25"]
    assert [_x(line) for line in plot.traces] == [[0, 1]]


def test_a_plan_looks_the_same_everywhere(four_methods: Report) -> None:
    """If it fails, a reader takes one plan for another from chart to chart."""
    group, styles = four_methods.groups[0], _styles(four_methods)
    lines = [line for line in _plot(scaling_charts(group, styles)[0]).traces if line.symbol]
    of_scaling = {scaling.sync_method: line.color for scaling, line in zip(group.scalings, lines, strict=True)}
    bars = known(throughput(group, styles))
    of_setting = {bar.name: bar.parts[0].color for bar in bars.bars}
    assert {of_setting[f"{name}, 2 ranks"] == color for name, color in of_scaling.items()} == {True}
    assert len(set(of_scaling.values())) == len(of_scaling) == 3


def test_lines_of_a_plan_differ_in_more_than_the_colour() -> None:
    style = plan_styles(["none"])["none"]
    looks = {(style.variant(number).dash, style.variant(number).symbol) for number in range(8)}
    assert len(looks) == 8
    assert len({style.color for style in plan_styles(map(str, range(8))).values()}) == 8
    assert len({style.dash for style in plan_styles(map(str, range(7))).values()}) == 7


def test_speedups_have_the_ideal_and_amdahls_curve(four_methods: Report) -> None:
    group = four_methods.groups[0]
    chart = scaling_charts(group, _styles(four_methods))[0]
    ideal, *lines = _plot(chart).traces
    assert (_x(ideal), _y(ideal)) == ([1, 4], [1, 4])
    for scaling, (fit, points) in zip(group.scalings, zip(lines[::2], lines[1::2], strict=True), strict=True):
        share = known(scaling.serial_share)
        assert _y(fit)[-1] == pytest.approx(1 / (share + (1 - share) / 4))
        assert _y(points) == pytest.approx([interval.median for interval in scaling.speedups])
    assert any(label.startswith("interleaved") and "f" in label for label in _names(chart))
    assert "naive" in chart.note
    _, *efficiencies = _plot(scaling_charts(group, _styles(four_methods))[1]).traces
    for scaling, line in zip(group.scalings, efficiencies, strict=True):
        shares = [100 * interval.median / n for n, interval in zip(scaling.num_ranks, scaling.speedups, strict=True)]
        assert _y(line) == pytest.approx(shares)


def test_a_scaling_without_one_rank_is_drawn_over_the_fewest(tmp_path: Path) -> None:
    for ranks in (2, 4, 8):
        save_run(tmp_path / str(ranks), f"ranks={ranks}", world_size=ranks, samples_per_s=10.0 * ranks)
    report = build_report([tmp_path])
    speedups, efficiencies = scaling_charts(report.groups[0], _styles(report))
    assert [_y(trace) for trace in _plot(speedups).traces] == [[1, 4], [1, 2, 4]]
    assert speedups.y_title == "speed-up over 2 ranks (times)"
    assert _y(_plot(efficiencies).traces[1]) == [100, 100, 100]


def test_a_scaling_that_makes_it_slower_is_named(four_methods: Report) -> None:
    slow = replace(four_methods.groups[0].scalings[0], serial_share=5.0)
    chart = scaling_charts(replace(four_methods.groups[0], scalings=(slow,)), _styles(four_methods))[0]
    assert "more ranks are slower than one" in chart.note


def test_the_parts_of_a_step_add_up(sweep: Report) -> None:
    """If it fails, a page says 16.1 % in one place and 17.2 % in another."""
    group = sweep.groups[0]
    chart = known(step_parts(group))
    steps_s = [setting.step_s.median for setting in group.settings if setting.step_s is not None]
    lengths = [bar.parts[-1].end for bar in chart.bars]
    assert sorted(lengths) == pytest.approx(sorted(step_s / max(steps_s) for step_s in steps_s))
    assert all(a.end == pytest.approx(b.start) for bar in chart.bars for a, b in pairwise(bar.parts))
    shares = [(bar.parts[-1].end - bar.parts[-1].start) / bar.parts[-1].end for bar in chart.bars]
    in_table = {setting.name: known(setting.exposed_share).median for setting in group.settings}
    assert shares == sorted(shares, reverse=True) == pytest.approx([in_table[bar.name] for bar in chart.bars])
    assert all(bar.value.startswith(f"{100 * in_table[bar.name]:.1f}") for bar in chart.bars)


def test_overlap_never_saves_more_than_its_bound(sweep: Report) -> None:
    chart = known(overlap(sweep.groups[0], _styles(sweep)))
    bounds, saved = zip(*((bar.parts[0].end, bar.parts[1].end) for bar in chart.bars), strict=True)
    assert all(saving <= bound + 1e-9 for saving, bound in zip(saved, bounds, strict=True))
    expected = [
        min(setting.step_s.median * (1 - setting.exposed_share.median), setting.comm_s.median)
        for setting in sweep.groups[0].settings
        if setting.step_s and setting.exposed_share and setting.comm_s
    ]
    assert sorted(bounds) == pytest.approx(sorted(length / max(expected) for length in expected))


def test_losses_end_where_the_runs_did(sweep: Report) -> None:
    by_step, by_time = loss_curves(sweep.groups[0], _styles(sweep))
    lines = [trace for trace in _plot(by_step).traces if trace.dash]
    assert {_x(trace)[-1] for trace in lines} == {200}
    ends_s = [_x(trace)[-1] for trace in _plot(by_time).traces if trace.dash]
    assert len(set(ends_s)) == len(ends_s)
    assert len(_names(by_step)) == len(lines) <= MAX_CURVES
    assert {len(trace.points) for trace in _plot(by_step).traces if trace.symbol} == {2}, "the validations"


def test_lossless_settings_of_a_plan_share_a_curve(sweep: Report) -> None:
    """Eight settings, four plans: bucket sizes do not change a loss."""
    same = _with(sweep.groups[0], val_loss=sweep.groups[0].settings[0].val_loss)
    chart = loss_curves(same, _styles(sweep))[0]
    assert len(_names(chart)) == 4
    assert "4 of 8 settings" in chart.note


def test_a_loss_ends_where_it_is_no_number(sweep: Report) -> None:
    """If it fails, a run that diverges looks like a shorter one that is well."""
    setting = sweep.groups[0].settings[0]
    chart = loss_curves(_with_losses(sweep, [5.0, 5.0, 5.0, math.nan, 6.0]), _styles(sweep))[0]
    (line,) = _plot(chart).traces
    assert _y(line) == [5.0] * 3
    assert f'The loss of "{setting.name}" is NaN from step 3 on.' in chart.note


def test_a_loss_that_was_never_a_number_is_named(sweep: Report) -> None:
    group = _with_losses(sweep, [math.nan])
    both = replace(group, settings=(*group.settings, *sweep.groups[0].settings[1:]))
    chart = loss_curves(both, _styles(sweep))[0]
    assert f'Never finite: the loss of "{group.settings[0].name}".' in chart.note


def test_the_losses_that_matter_are_drawn_first(sweep: Report) -> None:
    group = sweep.groups[0]
    settings = [
        replace(setting, name=f"{setting.name}, {turn}", sync_method=f"{setting.sync_method}{turn}")
        for turn in range(3)
        for setting in group.settings
    ]
    last = settings[-1]
    many = replace(group, settings=tuple(settings), baseline=last, fastest=settings[-3], recommended=settings[-5])
    chart = loss_curves(many, plan_styles(setting.sync_method for setting in settings))[0]
    hover = " ".join(trace.hover for trace in _plot(chart).traces)
    assert all(setting.name in hover for setting in settings[-1:-6:-2])
    assert len(_names(chart)) == MAX_CURVES
    assert "7 more are left out" in chart.note


def test_a_steep_loss_has_a_logarithmic_axis(sweep: Report) -> None:
    chart = loss_curves(_with_losses(sweep, [10.0 / (1 + at) for at in range(50)]), _styles(sweep))[0]
    assert _plot(chart).y.is_log
    assert "logarithmic" in chart.y_title


def test_memory_has_a_bar_for_each_setting(sweep: Report) -> None:
    group = sweep.groups[0]
    chart = known(peak_memory(group, _styles(sweep)))
    assert [bar.value for bar in chart.bars] == ["460 MB"] * len(group.settings)
    unknown = replace(group, settings=tuple(replace(setting, peak_memory_bytes=0.0) for setting in group.settings))
    assert peak_memory(unknown, _styles(sweep)) is None


def test_timelines_show_each_plan_on_one_time_axis(sweep: Report) -> None:
    group = sweep.groups[0]
    charts = timelines(group)
    assert [chart.title for chart in charts] == [setting.name for setting in group.settings]
    assert len({known(chart.lane_axis).high for chart in charts}) == 1
    for chart in charts:
        kinds = {part.swatch for lane in chart.lanes for part in lane.parts}
        assert {"forward", "backward", "optimizer", "wire", "stalled"} <= kinds
        assert "Step " in chart.note
        assert chart.rows is None  # no collectives but DDP's own
        assert [lane.name for lane in chart.lanes if lane.name] == ["rank 0", "rank 1"]


def test_a_timeline_has_the_times_of_the_step(sweep: Report) -> None:
    """If it fails, a reader sees communication where there was none."""
    group = sweep.groups[0]
    (step, *_), (chart, *_) = typical_steps(group), timelines(group)
    (record, *_), axis = step.ranks, known(chart.lane_axis)
    phases, *buckets = chart.lanes[: 1 + len(record.buckets)]
    length_s = axis.high * 1e-3
    assert chart.x_title.endswith("(ms)")
    drawn = [(part.start * length_s, part.end * length_s) for part in phases.parts]
    assert drawn[: len(record.phases)] == [
        pytest.approx((phase.start_s - record.start_s, phase.end_s - record.start_s)) for phase in record.phases
    ]
    last = record.buckets[-1]
    assert drawn[-1] == pytest.approx((last.ready_s - record.start_s, last.end_s - record.start_s))
    sent = [part for lane in buckets for part in lane.parts if part.swatch == "wire"]
    spans = [span for bucket in record.buckets for span in bucket.wire]
    assert [(part.end - part.start) * length_s for part in sent] == pytest.approx([end - start for start, end in spans])


def test_timelines_are_of_the_settings_with_most_ranks(four_methods: Report) -> None:
    titles = [chart.title for chart in timelines(four_methods.groups[0])]
    assert titles == ["naive, 4 ranks", "interleaved, 4 ranks", "DDP, 4 ranks"]


def test_timelines_are_few(sweep: Report) -> None:
    """The fastest and the slowest of each plan, where there are too many."""
    group = sweep.groups[0]
    many = [
        replace(setting, name=f"{setting.name}, {turn}", values={**setting.values, "turn": str(turn)})
        for setting in group.settings
        for turn in range(3)
    ]
    found = typical_steps(replace(group, settings=tuple(many)))
    assert len(found) == MAX_SETTINGS
    assert len({step.setting.sync_method for step in found}) == 4


def test_a_step_of_ranks_with_different_clocks_is_on_one(tmp_path: Path) -> None:
    """If it fails, ranks that synchronized a bucket together are drawn apart."""
    write_run(tmp_path, SampleRun())
    path = rank_file(tmp_path, 1)
    path.write_text("\n".join(_later(json.loads(line), 3.5) for line in path.read_text().splitlines()))
    (step,) = typical_steps(_group_of(tmp_path))
    first, second = (
        [at_s - start_s for at_s in (record.start_s, *(bucket.end_s for bucket in record.buckets))]
        for record, start_s in zip(step.ranks, step.starts_s, strict=True)
    )
    assert second == pytest.approx(first)


def test_settings_without_records_have_no_timeline(tmp_path: Path) -> None:
    assert timelines(_group_of(tmp_path)) == []
    rank_file(tmp_path, 0).parent.mkdir()
    rank_file(tmp_path, 0).write_text("broken\n")
    assert timelines(_group_of(tmp_path)) == []


def test_steps_that_are_too_many_are_not_read(sweep: Report) -> None:
    """If it fails, a report of long runs takes minutes, and gigabytes."""
    group = sweep.groups[0]
    runs = tuple(replace(run, has_steps=False) for run in group.settings[0].runs)
    assert timelines(_with(group, runs=runs)) == []


def test_charts_without_numbers_are_left_out(sweep: Report, tmp_path: Path) -> None:
    unknown = dict.fromkeys(("samples_per_s", "step_s", "comm_s", "exposed_s", "peak_memory_bytes"))
    group = _with(sweep.groups[0], **unknown, runs=())
    assert sections(group, _styles(sweep)) == []


def test_every_number_lies_within_its_axes(report: Report) -> None:
    """If it fails, a chart hides a point, or an axis has no number to read it by, or more than a phone has room for."""
    plots = [
        known(chart.plot)
        for group in report.groups
        for chart in (
            *(chart for section in sections(group, _styles(report)) for chart in section.charts if chart.plot),
            known(decision(group, _styles(report))),
        )
    ]
    assert len(plots) >= 3
    for plot in plots:
        across, down = extent(plot.traces)
        for axis, values in ((plot.x, across), (plot.y, down)):
            assert all(0 <= round(axis.place(value), 6) <= 100 for value in values)
            assert 1 <= len([value for value, _ in axis.ticks if 0 <= axis.place(value) <= 100]) <= 7


def test_the_decision_has_each_speedup_with_its_price(sweep: Report) -> None:
    """If it fails, the picture that readers decide by shows other numbers than the table."""
    group = sweep.groups[0]
    chart = known(decision(group, _styles(sweep)))
    points = {
        point.hover.partition(":")[0]: (point, trace.is_marked)
        for trace in _plot(chart).traces
        if trace.symbol
        for point in trace.points
    }
    assert set(points) == {setting.name for setting in group.settings}
    base, _ = points[group.baseline.name]
    assert (base.x, base.y, base.x_ends, base.label) == (1, 0, None, "baseline")
    losses = known(group.baseline.val_loss)
    (band,) = _plot(chart).bands
    assert band.y_ends == pytest.approx(
        [100 * (known(end) / losses.median - 1) for end in (losses.low, losses.high)],
    )
    for setting in group.settings:
        point, is_marked = points[setting.name]
        assert is_marked == (setting is group.recommended)
        if setting is not group.baseline:
            speedup, loss = known(setting.speedup), known(setting.val_loss)
            assert (point.x, point.x_ends) == (speedup.median, (speedup.low, speedup.high))
            assert point.y == pytest.approx(100 * (loss.median / losses.median - 1))
            assert known(point.y_ends)[1] == pytest.approx(100 * (known(loss.high) / losses.median - 1))


def test_many_settings_have_the_looks_of_their_plans_and_the_page_folds_their_bars(
    sweep: Report, tmp_path: Path
) -> None:
    """If it fails, several settings share a mark in the legend, and charts lie tens of thousands of pixels below."""
    group = sweep.groups[0]
    others = [setting for setting in group.settings if setting is not group.baseline]
    more = tuple(replace(setting, name=f"{setting.name}, {n}") for n in range(3) for setting in others)
    many = replace(group, settings=(*group.settings, *more))
    chart = known(decision(many, _styles(sweep)))
    marked = [trace for trace in _plot(chart).traces if trace.symbol]
    assert (len(marked), _names(chart)) == (29, ["uncompressed", "bf16", "int8", "PowerSGD"])
    assert {(trace.color, trace.symbol) for trace in marked} == {
        (style.color, style.symbol) for style in _styles(sweep).values()
    }
    write_page(replace(sweep, groups=(many,)), tmp_path / "many.html")
    assert "<summary>5 more</summary>" in (tmp_path / "many.html").read_text(encoding="utf-8")


def test_without_losses_the_decision_is_bars(sweep: Report) -> None:
    group = sweep.groups[0]
    settings = tuple(replace(setting, loss_change=None) for setting in group.settings)
    without = replace(group, settings=settings, baseline=settings[0], recommended=None)
    chart = known(decision(without, _styles(sweep)))
    assert chart.plot is None
    assert chart.note.startswith(WITHOUT_LOSS)
    medians = [1.0, *(known(setting.speedup).median for setting in settings[1:])]
    ends = [bar.parts[0].end for bar in chart.bars]
    assert [end / ends[0] for end in ends] == pytest.approx(medians)
    known_end = known(chart.bars[-1].interval)[1] / ends[0]
    assert known_end == pytest.approx(known(settings[-1].speedup).high)


def test_a_setting_without_a_loss_is_named_below_the_decision(sweep: Report) -> None:
    group = sweep.groups[0]
    settings = (*group.settings[:-1], replace(group.settings[-1], loss_change=None))
    chart = known(decision(replace(group, settings=settings, recommended=None), _styles(sweep)))
    assert f"because they have no validation loss: {settings[-1].name}." in chart.note
    assert len(_names(chart)) == len(settings) - 1


def test_a_single_setting_needs_no_decision(sweep: Report) -> None:
    alone = _with(replace(sweep.groups[0], settings=sweep.groups[0].settings[:1]))
    assert decision(alone, _styles(sweep)) is None


@pytest.mark.parametrize(
    ("ends", "texts"),
    [
        ((0.0, 13.0), ["0", "5", "10"]),
        ((-0.4, 0.9), ["0.0", "0.5"]),
        ((0.0, 0.0032), ["0.000", "0.001", "0.002", "0.003"]),
        ((0.0, 250_000.0), ["0", "50,000", "100,000", "150,000", "200,000", "250,000"]),
    ],
)
def test_ticks_are_round_numbers(ends: tuple[float, float], texts: list[str]) -> None:
    axis = linear_axis([], ends=ends)
    shown = [text for _, text in axis.ticks]
    assert shown[-len(texts) :] == texts
    assert len(shown) <= 7


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances() -> None:
    axis = log_axis([1.0, 1000.0])
    assert axis.place(10) - axis.place(1) == pytest.approx(axis.place(1000) - axis.place(100))
    assert [text for _, text in axis.ticks] == ["1", "10", "100", "1000"]
    assert [text for _, text in log_axis([1.0, 6.0]).ticks] == ["1", "2", "5"]
    axis = log_axis([3.0, 3.0])
    assert axis.place(3.0) == pytest.approx(50)
    assert [text for _, text in axis.ticks] == ["2"]
    axis = log_axis([1.0, 1e308])
    assert len(axis.ticks) == 6
    assert axis.place(1e308) == 100


def _group_of(folder: Path) -> Group:
    other = folder / "elsewhere"
    write_run(other, SampleRun())
    (group,) = build_report([other]).groups
    setting = replace(group.settings[0], runs=(replace(group.settings[0].runs[0], folder=folder),))
    return replace(group, settings=(setting,), baseline=setting, fastest=setting)


def _later(values: dict[str, Any], shift_s: float) -> str:
    """Returns a line of a file of steps as a rank would have written it whose clock began earlier."""
    if values["type"] == "step":
        values["phases"] = [[name, start + shift_s, end + shift_s] for name, start, end in values["phases"]]
        for bucket in values["buckets"]:
            bucket.update({key: bucket[key] + shift_s for key in ("ready_s", "start_s", "end_s")})
            bucket["wire"] = [[start + shift_s, end + shift_s] for start, end in bucket["wire"]]
    return json.dumps(values)


def test_the_typical_run_is_that_of_median_throughput(sweep: Report) -> None:
    setting = sweep.groups[0].settings[0]
    run = known(typical_run(setting))
    rates = sorted(run.record.samples_per_s or 0.0 for run in setting.runs)
    assert run.record.samples_per_s == rates[1]
