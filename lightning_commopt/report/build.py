"""Builds a `Report` from directories: reads, sorts and compares runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from lightning_commopt.report.answer import answer_for
from lightning_commopt.report.baseline import (
    choose_baseline,
    compare_settings,
    find_scalings,
    one_process_for,
    speedup_limit,
)
from lightning_commopt.report.conditions import conditions_of, find_mixed_conditions, title_of
from lightning_commopt.report.model import Group, Report, Setting
from lightning_commopt.report.published import published_figures
from lightning_commopt.report.runs import read_runs
from lightning_commopt.report.settings import GroupRuns, group_runs


def build_report(folders: Sequence[Path], *, baseline: str | None = None) -> Report:
    """Builds the report of all runs below some directories, of sweeps or runs.

    Speed-ups are over the setting called ``baseline`` in every group that has it, else over `choose_baseline`'s choice.

    Raises:
        ValueError: there is nothing to report, or no group has a setting of that name.
    """
    found = read_runs(folders)
    all_groups = group_runs(found)
    with_results = [group for group in all_groups if group.settings]
    names = [setting.name for group in with_results for setting in group.settings]
    if baseline is not None and baseline.lower() not in [name.lower() for name in names]:
        allowed = "; ".join(dict.fromkeys(names)) or "none, as no run has finished"
        raise ValueError(f"no setting is called {baseline!r}; there are: {allowed}")
    groups = tuple(_group(group, baseline) for group in with_results)
    return Report(
        title=title_of(found, folders),
        groups=groups,
        failed=tuple(run for group in all_groups for run in group.failed),
        problems=(*found.problems, *find_mixed_conditions(groups)),
        conditions=conditions_of(found),
    )


def _group(found: GroupRuns, baseline_name: str | None) -> Group:
    measured = found.settings
    timed = [setting for setting in measured if setting.samples_per_s is not None]
    baseline = choose_baseline(measured if baseline_name or not timed else timed, baseline_name)
    settings = tuple(_compare_setting(setting, baseline, measured) for setting in measured)
    baseline = {setting.name: setting for setting in settings}[baseline.name]
    rates = [
        (setting.samples_per_s.median, setting)
        for setting in settings
        if setting.samples_per_s is not None and not setting.is_beyond_limit
    ]
    _, fastest = max(rates, key=itemgetter(0), default=(0.0, baseline))
    answer = answer_for(settings, baseline)
    return Group(
        name=found.name,
        settings=settings,
        baseline=baseline,
        fastest=fastest,
        scalings=find_scalings(settings),
        answer=answer.sentences,
        recommended=answer.recommended,
    )


def _compare_setting(setting: Setting, baseline: Setting, settings: Sequence[Setting]) -> Setting:
    """Returns the setting with its comparisons with others."""
    comparison = None if setting is baseline else compare_settings(setting, baseline)
    one_process = one_process_for(setting, settings)
    over_one = None if one_process is None else compare_settings(setting, one_process)
    return dataclasses.replace(
        setting,
        speedup=None if comparison is None else comparison.ratio,
        difference=None if comparison is None else comparison.difference,
        speedup_limit=None if comparison is None else speedup_limit(setting, baseline),
        efficiency=None if over_one is None else over_one.ratio.median / setting.world_size,
        published=published_figures(setting.runs[0].settings, setting.world_size, baseline.runs[0].settings),
    )
