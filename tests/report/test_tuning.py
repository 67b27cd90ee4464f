"""The search of ``plan="auto"`` on the page, and the collectives of a step, from the files of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, RunRecorder, SpeedMonitor
from lightning_commopt.compat.collectives import has_collective_hooks
from lightning_commopt.compat.sigterm import broadcasts_sigterm
from lightning_commopt.measure.plain import from_plain
from lightning_commopt.measure.runs.record import Tuning
from lightning_commopt.measure.summary import summarize_run
from lightning_commopt.report.build import build_report
from lightning_commopt.report.figures.style import Chart, plan_styles
from lightning_commopt.report.page import sections
from support.known import known
from support.ranks import run_ranks
from support.sample_runs import save_run
from support.sample_tuning import BASE_S, INT8, SMALL, sample_tuning, tuned_report
from support.scripted_tuning import scripted
from support.strategy_models import Tiny, loader, trainer

_TUNING, _STEPS = 'The search of plan="auto"', "One step"


def _charts(folder: Path) -> dict[str, list[Chart]]:
    report = build_report([folder])
    (group,) = report.groups
    styles = plan_styles(setting.sync_method for setting in group.settings)
    return {section.title: section.charts for section in sections(group, styles)}


def _chart(folder: Path, tuning: dict[str, Any]) -> Chart:
    (chart,) = _charts(save_run(folder, "strategy.plan=auto", tuning=tuning))[_TUNING]
    return chart


def _texts(chart: Chart) -> list[tuple[str, ...]]:
    return [(cells[0].small, *(cell.text for cell in cells)) for cells in known(chart.rows).rows]


def test_the_title_has_the_start_the_end_and_the_gain(tmp_path: Path) -> None:
    """If it fails, a reader must work out from the table what the search has brought."""
    tuning = sample_tuning({INT8: 0.4, SMALL: 1.4})
    chart = _chart(tmp_path, tuning)
    assert chart.title == "Started on uncompressed, ended on int8, saved 60 % of a step"
    assert chart.note == tuning["verdict"]
    assert chart.note.startswith("Chosen after ")


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    chart = _chart(tmp_path, sample_tuning({INT8: 0.4, SMALL: 1.4}, noise=0.0))
    assert _texts(chart) == [
        ("started on", "uncompressed", "210 ms", "200 ms"),
        ("ended on", "int8", "84.0 ms", "80.0 ms"),
        ("tried: slower", "uncompressed, 5 MiB buckets", "294 ms", "280 ms"),
    ]
    own, int8, _ = known(chart.rows).rows
    assert int8[1].small == "80.0 to 88.0"
    low, high = map(float, int8[2].small.split(" to "))
    assert low < 80 < high < 100
    assert not own[2].small


def test_every_step_of_the_search_is_drawn_as_its_plan(tmp_path: Path) -> None:
    """If it fails, steps are drawn at the wrong place, or as steps of another plan."""
    chart = _chart(tmp_path, sample_tuning({INT8: 0.4, SMALL: 1.4}))
    plot = known(chart.plot)
    by_plan = {line.name: trace for line, trace in zip(chart.lines, plot.traces, strict=True)}
    assert list(by_plan) == ["uncompressed", "int8", "uncompressed, 5 MiB buckets"]
    in_order = sorted(point.x for trace in by_plan.values() for point in trace.points)
    assert in_order == list(range(len(in_order)))
    assert len(in_order) > 30
    for share, trace in zip((1.0, 0.4, 1.4), by_plan.values(), strict=True):
        times_ms = [point.y for point in trace.points[1:]]
        assert times_ms == pytest.approx([1e3 * BASE_S * share] * len(times_ms), rel=0.1)
    top = plot.y.high
    slowest = by_plan["uncompressed"].points[0]
    assert slowest.y == pytest.approx(0.98 * top, rel=1e-4)
    assert float(slowest.hover.removeprefix("uncompressed, step 0: ").removesuffix(" ms")) > 1.5 * top
    ends = [known(band.x_ends) for band in plot.bands]
    assert [left for left, _ in ends[1:]] == [right for _, right in ends[:-1]]
    assert (ends[0][0], ends[-1][1]) == (plot.x.low, plot.x.high)
    colors = {band.color for band in plot.bands}
    assert colors == {trace.color for trace in plot.traces}
    assert len(colors) == 3


def test_a_plan_that_stays_is_named_with_the_reason(tmp_path: Path) -> None:
    tuning = sample_tuning({SMALL: 1.4})
    assert 0 < tuning["calibration_lost_steps"] < tuning["lost_steps"]
    worse = _chart(tmp_path / "worse", tuning)
    assert worse.title == "Started and ended on uncompressed"
    assert [decision for decision, *_ in _texts(worse)] == ["started on and ended on", "tried: slower"]
    short = _chart(tmp_path / "short", sample_tuning({SMALL: 0.5}, num_steps=50))
    assert short.title == "Started and ended on uncompressed"
    assert "too short" in short.note
    assert [decision for decision, *_ in _texts(short)] == ["started on and ended on"]


def test_later_events_have_their_step(tmp_path: Path) -> None:
    tuning = sample_tuning({INT8: 0.4})
    chart = _chart(tmp_path, {**tuning, "events": [[1200, "drift"], [1300, "drift"]]})
    assert chart.note.endswith("Step 1,200: drift. Step 1,300: drift.")


@pytest.mark.exhaustive
def test_several_settings_have_a_chart_each(tmp_path: Path) -> None:
    save_run(tmp_path / "0", "strategy.plan=auto", "strategy.lossy=never", tuning=sample_tuning({SMALL: 0.9}))
    save_run(tmp_path / "1", "strategy.plan=auto", "strategy.lossy=[int8]", tuning=sample_tuning({INT8: 0.4}))
    save_run(tmp_path / "2", "strategy.plan=null")
    charts = _charts(tmp_path)[_TUNING]
    assert len(charts) == 2
    assert all(": Started on uncompressed, ended on " in chart.title for chart in charts)


@pytest.mark.parametrize(
    "change",
    [
        {"candidates": [{}]},
        {"history": [{"plan": "x", "first_step": 0, "num_steps": 1, "seconds": ["0.1"]}]},
        {"candidates": [{"plan": "x", "predicted_s": [], "gain": None}]},
        {"base_step_s": float("nan")},
        {"events": [["drift", 1200]]},
    ],
)
def test_a_search_that_cannot_be_read_is_a_warning(tmp_path: Path, change: dict[str, Any]) -> None:
    """If it fails, one broken file ends a report of many runs."""
    save_run(tmp_path / "0", samples_per_s=1.0, tuning={**sample_tuning({INT8: 0.4}), **change})
    report = build_report([tmp_path])
    assert any("0/run.json: the results of plan='auto' cannot be read" in problem for problem in report.problems)
    assert _TUNING not in _charts(tmp_path)


def test_other_runs_have_neither(tmp_path: Path) -> None:
    report = tuned_report(tmp_path)
    group = report.groups[0]
    (run,) = group.settings[0].runs
    plain = replace(group.settings[0], runs=(replace(run, tuning=None, has_steps=False),))
    titles = [section.title for section in sections(replace(group, settings=(plain,)), plan_styles(["none"]))]
    assert _TUNING not in titles
    assert _STEPS not in titles


def test_a_step_has_its_collectives(tmp_path: Path) -> None:
    tuned_report(tmp_path)
    (step,) = _charts(tmp_path / "tuned")[_STEPS]
    shown = [(cells[0].small, cells[0].text) for cells in known(step.rows).rows]
    assert shown == [("data", "broadcast (Lightning's own)"), ("backward", "all_reduce")]


def _fit(folder: Path) -> None:
    callbacks = [CommTimeMonitor(dirpath=folder, num_warmup_steps=0), SpeedMonitor(), RunRecorder(dirpath=folder)]
    with scripted({SMALL: 1.2, INT8: 0.5}):
        strategy = CommOptDDP(plan="auto", lossy=["int8"])
        trainer(strategy, max_epochs=40, callbacks=callbacks).fit(Tiny(), loader())


@pytest.mark.exhaustive
def test_the_files_of_a_fit(tmp_path: Path) -> None:
    """If it fails, what a fit leaves is not what the report reads, or page and console differ in its collectives."""
    run_ranks(_fit, tmp_path)
    values = json.loads((tmp_path / "run.json").read_text())
    assert values["sync_method"] == "auto"
    tuning = from_plain(Tuning, values["tuning"])
    assert tuning.chosen == tuning.history[-1].plan == "int8"
    assert tuning.history[0].plan == "uncompressed"
    for before, after in zip(tuning.history, tuning.history[1:], strict=False):
        assert after.first_step == before.first_step + before.num_steps
        assert after.plan != before.plan or after.steps_per_number != before.steps_per_number
    charts = _charts(tmp_path)
    (search,), (step,) = charts[_TUNING], charts[_STEPS]
    assert search.title == "Started on uncompressed, ended on int8, saved 50 % of a step"
    if has_collective_hooks() or broadcasts_sigterm(trainer("auto")):
        summary, _ = summarize_run(tmp_path)
        shown = {(cells[0].small, cells[0].text): cells[2].text for cells in known(step.rows).rows}
        assert {(one.phase, one.label) for one in summary.operations} >= shown.keys()
        assert shown["data", "broadcast (Lightning's own)"] == "8.00 B"
    else:
        assert step.rows is None
