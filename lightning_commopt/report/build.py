"""Builds a `Report` from directories: reads, sorts and compares runs, and finds where their conditions differ."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import Settings, text_of
from lightning_commopt.report.answer import answer_for
from lightning_commopt.report.baseline import (
    choose_baseline,
    compare_settings,
    find_scalings,
    loss_change,
    one_process_for,
    speedup_limit,
    values_beside_plan,
)
from lightning_commopt.report.grouping import GroupRuns, group_runs
from lightning_commopt.report.model import Group, Published, Report, Run, Setting
from lightning_commopt.report.names import display_name, link_of
from lightning_commopt.report.runs import FoundRuns, read_runs
from lightning_commopt.report.simultaneous import differences_that_hold
from lightning_commopt.text.formatting import count, grouped, list_some

_NUM_COMMIT_DIGITS = 10


def build_report(folders: Sequence[Path], *, baseline: str | None = None) -> Report:
    """Builds the report of all runs below some directories, of sweeps or runs.

    Speed-ups are over the setting called ``baseline`` in every group that has it, else over `choose_baseline`'s choice.

    Raises:
        ValueError: there is nothing to report, or no group has a setting of that name.
    """
    found_runs = read_runs(folders)
    all_groups = group_runs(found_runs)
    with_results = [group for group in all_groups if group.settings]
    names = [setting.name for group in with_results for setting in group.settings]
    if baseline is not None and baseline.lower() not in [name.lower() for name in names]:
        allowed = "; ".join(dict.fromkeys(names)) or "none, as no run has finished"
        raise ValueError(f"no setting is called {baseline!r}; there are: {allowed}")
    groups = tuple(_group(group, baseline) for group in with_results)
    return Report(
        title=_title(found_runs, folders),
        groups=groups,
        failed=tuple(run for group in all_groups for run in group.failed),
        problems=(*found_runs.problems, *_find_uncompressed(groups), *_mixed_conditions(groups)),
        conditions=_conditions(found_runs),
    )


def _group(group: GroupRuns, baseline_name: str | None) -> Group:
    measured = group.settings
    timed = [setting for setting in measured if setting.samples_per_s is not None]
    baseline = choose_baseline(measured if baseline_name or not timed else timed, baseline_name)
    settings = tuple(_compare_setting(setting, baseline, measured) for setting in measured)
    holding = differences_that_hold(settings, baseline)
    settings = tuple(
        dataclasses.replace(setting, difference="unknown")
        if setting.difference in ("faster", "slower") and setting.name not in holding
        else setting
        for setting in settings
    )
    baseline = {setting.name: setting for setting in settings}[baseline.name]
    rates = [
        (setting.samples_per_s.median, setting)
        for setting in settings
        if setting.samples_per_s is not None and not setting.is_beyond_limit
    ]
    _, fastest = max(rates, key=itemgetter(0), default=(0.0, baseline))
    answer = answer_for(settings, baseline)
    return Group(
        name=group.name,
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
        loss_change=loss_change(setting, baseline),
        speedup_limit=None if comparison is None else speedup_limit(setting, baseline),
        efficiency=None if over_one is None else over_one.ratio.median / setting.world_size,
        published=_published_figures(setting.runs[0].settings, setting.world_size, baseline.runs[0].settings),
    )


def _published_figures(settings: Settings, world_size: int, baseline: Settings) -> tuple[Published, ...]:
    """Returns what `published.yaml` has for a run; without speed-ups if its baseline was another."""
    variant, method = settings.get("variant"), settings.get("method")
    is_same_baseline = True
    if variant is not None:
        known = _published()["ladder"]
        figures = known["figures"].get(variant, ())
        is_same_baseline = baseline.get("variant") == "one_bucket"
    elif method is not None:
        known = _published()["methods"]
        speedup = known["speedups"].get(settings.get("model.size"), {}).get(method, {}).get(world_size)
        label = f"{speedup:.2f} times one GPU on {world_size}x A100 (PCIe)" if speedup is not None else ""
        figures = [{"label": label, "speedup": speedup}] if label else []
        is_same_baseline = baseline.get("method") == "one_process"
    elif settings.get("experiment") == "buckets":
        known = _published()["buckets"]
        figures = known["figures"].get(settings.get("strategy.bucket_cap_mb"), ())
    else:
        return ()
    shown = figures if is_same_baseline else [{"label": figure["label"]} for figure in figures]
    return tuple(Published(**figure, source=known["source"]) for figure in shown)


@cache
def _published() -> dict[str, dict[str, Any]]:
    text = (files("lightning_commopt.report") / "published.yaml").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return known


def _title(found_runs: FoundRuns, folders: Sequence[Path]) -> str:
    """Returns the names of the experiments, or else of the directories."""
    names = dict.fromkeys(run.settings.get("experiment") for run in (*found_runs.finished, *found_runs.failed))
    names_text = [display_name(name) for name in names if isinstance(name, str)]
    return ", ".join(names_text or dict.fromkeys(folder.resolve().name for folder in folders))


_CONDITIONS: dict[str, Callable[[Run], str | None]] = {
    "hardware": lambda run: _hardware(run.record),
    "trained on": lambda run: run.record.device,
    "ranks": lambda run: str(run.record.world_size or ""),
    "link": link_of,
    "parameters": lambda run: _num_parameters(run.record),
    "samples a rank and batch": lambda run: text_of(run.settings.get("data.batch_size") or ""),
    "timed steps": lambda run: str(run.record.num_timed_steps or ""),
    "versions": lambda run: ", ".join(f"{name} {version}" for name, version in run.record.versions.items()),
    "git": lambda run: _commit(run.record),
}
# Conditions that should not differ within a group, in words.
_MUST_AGREE = {
    "hardware": "hardware",
    "trained on": "devices",
    "git": "git commits",
    "parameters": "numbers of parameters",
}
# Numbers that should not differ either, and that a configuration need not have. A larger batch changes throughput and
# loss, and a longer fit changes the final loss.
_EQUAL: dict[str, Callable[[Run], float | None]] = {
    "numbers of samples in a step": lambda run: _samples_per_step(run),
    "numbers of optimizer steps": lambda run: run.losses[-1].step if run.losses else None,
}
_UNEQUAL = 0.05  # share by which they may differ, as the last batch of an epoch may be smaller


def _conditions(found_runs: FoundRuns) -> dict[str, str]:
    """Returns what a reader must know to judge the numbers, name to value."""
    runs = [*found_runs.finished, *found_runs.failed]
    days = sorted({run.record.started_at[:10] for run in runs if run.record.started_at})
    conditions = {
        "runs": [
            f"{len(found_runs.finished)} finished" + (f", {len(found_runs.failed)} failed" if found_runs.failed else "")
        ],
        **{name: _distinct(map(condition, runs)) for name, condition in _CONDITIONS.items()},
        "date": _distinct([" to ".join(dict.fromkeys([*days[:1], *days[-1:]]))]),
    }
    return {name: "; ".join(values) for name, values in conditions.items() if values}


def _find_uncompressed(groups: Sequence[Group]) -> list[str]:
    """Returns a line about the settings whose compressor saved no bytes, so that their numbers are not its own."""
    names = [setting.name for group in groups for setting in group.settings if any(map(_is_uncompressed, setting.runs))]
    reason = "the compressor left all gradients uncompressed in the measured steps, as it does before its start_step"
    return [f"{list_some(list(dict.fromkeys(names)))}: {reason}"] if names else []


def _is_uncompressed(run: Run) -> bool:
    has_compressor = "comm_hook.name" in (run.settings.plan or {}) and bool(run.record.is_lossy)
    return has_compressor and run.record.comm_time.get("compression_ratio") == 1


def _mixed_conditions(groups: Sequence[Group]) -> list[str]:
    """Returns a line for each condition that differs between runs of a group."""
    runs = {group.name: [run for setting in group.settings for run in setting.runs] for group in groups}
    lines = grouped(
        (line, group.name)
        for group in groups
        for line in (*_find_mixed(runs[group.name]), *_find_unequal(group.settings))
    )
    return [f"{'' if len(names) == len(groups) else ', '.join(names) + ': '}{line}" for line, names in lines.items()]


def _find_mixed(runs: Sequence[Run]) -> list[str]:
    packages = dict.fromkeys(name for run in runs for name in run.record.versions)
    versions = {f"versions of {name}": _distinct(run.record.versions.get(name) for run in runs) for name in packages}
    conditions = versions | {words: _distinct(map(_CONDITIONS[name], runs)) for name, words in _MUST_AGREE.items()}
    mixed = {condition: " and ".join(values) for condition, values in conditions.items() if len(values) > 1}
    return [f"runs with different {condition} are compared: {values}" for condition, values in mixed.items()]


def _find_unequal(settings: Sequence[Setting]) -> list[str]:
    """Returns a line for each of `_EQUAL` that differs between runs whose settings differ only in the plan."""
    comparable = grouped(
        ((setting.world_size, *sorted(values_beside_plan(setting).items())), run)
        for setting in settings
        for run in setting.runs
    )
    lines = []
    for quantity, number_of in _EQUAL.items():
        for runs in comparable.values():
            known = [value for run in runs if (value := number_of(run)) is not None]
            if known and max(known) > (1 + _UNEQUAL) * min(known):
                lines.append(f"runs with different {quantity} are compared: {min(known):,.0f} to {max(known):,.0f}")
    return list(dict.fromkeys(lines))


def _samples_per_step(run: Run) -> float | None:
    rate, steps_per_s = run.throughput, run.record.steps_per_s
    return None if rate is None or not steps_per_s else rate / steps_per_s


def _distinct(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(filter(None, values)))


def _hardware(record: RunRecord) -> str:
    shown = Counter(
        f"{device.get('name', device.get('kind', 'unknown'))}"
        + (f", {count(device['num_cores'], 'core')}" if device.get("kind") == "cpu" and "num_cores" in device else "")
        for device in record.hardware
    )
    return " + ".join(name if num == 1 else f"{num}x {name}" for name, num in shown.items())


def _num_parameters(record: RunRecord) -> str | None:
    return None if record.num_parameters is None else f"{record.num_parameters / 1e6:.3g} M"


def _commit(record: RunRecord) -> str | None:
    commit = (record.git or {}).get("commit")
    if not isinstance(commit, str):
        return None
    return commit[:_NUM_COMMIT_DIGITS] + (" with changes" if (record.git or {}).get("has_changes") else "")
