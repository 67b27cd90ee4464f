"""Sorts runs into settings, whose runs differ in repetition and seed alone, and groups of comparable settings."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.measure.runs.settings import Value, text_of
from lightning_commopt.report.choices import canonical, is_off, is_ranks
from lightning_commopt.report.config_lines import config_lines
from lightning_commopt.report.intervals import median_interval
from lightning_commopt.report.model import Run, Setting
from lightning_commopt.report.names import setting_name
from lightning_commopt.report.runs import FoundRuns
from lightning_commopt.text.formatting import grouped

_OPTIONAL_CHOICES = ("experiment", "variant", "method", "link", "hosts")  # disabling these is not choosing them

# Runs that differ in one of these cannot be compared, so they make separate groups. The exceptions are what a user
# varies to make the same training faster.
_SPLITTING = ("model", "data", "datamodule", "link", "hosts", "experiment")
_NOT_SPLITTING = ("data.batch_size", "model.activation_checkpointing")
_ON_ONE_PROCESS = ("one_process", "ddp_one_process")
_Values = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class GroupRuns:
    """Settings that can be compared, without comparisons yet, and their failed runs. A single group has no name."""

    name: str
    settings: tuple[Setting, ...]
    failed: tuple[Run, ...]


def group_runs(found_runs: FoundRuns) -> list[GroupRuns]:
    """Sorts runs into settings and groups, in the order in which they were found.

    A setting is defined by the resolved values of everything that some run chose and that can change the training; for
    equal values of different runs (another launcher, no Hydra), by plan and number of ranks as well.
    """
    runs = [*found_runs.finished, *found_runs.failed]
    names = dict.fromkeys(name for run in runs for name in run.choices)
    values = _add_plans(runs, _varied([_chosen_values(run, names) for run in runs]))
    groups = _split(runs, values, _splits_groups)
    if all(len(settings) == 1 and not any(own for own, _ in settings) for _, settings in groups):
        # If every experiment chose just one plan, the experiments themselves are what the user wants to compare.
        groups = _split(runs, values, lambda name: _splits_groups(name) and name != "experiment")
    group_names = _unique_names([split for split, _ in groups])
    return [_group(name, split, settings) for name, (split, settings) in zip(group_names, groups, strict=True)]


def _chosen_values(run: Run, names: Iterable[str]) -> _Values:
    """Returns the values of names that some run chose, with the actual number of ranks."""
    values = {name: run.settings.get(name) for name in names if name in run.settings}
    values = {name: value for name, value in values.items() if not (name in _OPTIONAL_CHOICES and is_off(value))}
    is_on_one = values.get("variant", values.get("method")) in _ON_ONE_PROCESS
    if not is_on_one and (run.record.world_size is None or not any(map(is_ranks, names))):
        return values
    values = {name: value for name, value in values.items() if not is_ranks(name)}
    return values if is_on_one else {**values, "ranks": run.record.world_size}


def _varied(options: Sequence[_Values]) -> list[_Values]:
    """Returns each mapping with only the names whose values differ between the mappings."""
    names = dict.fromkeys(name for values in options for name in values)
    varying = [name for name in names if len({values.get(name) for values in options}) > 1]
    return [{name: values[name] for name in varying if name in values} for values in options]


def _key(values: _Values) -> frozenset[tuple[str, Value]]:
    """Returns a key that equal values share; what is null is as if it were not there."""
    return frozenset((name, value) for name, value in values.items() if value is not None)


def _add_plans(runs: Sequence[Run], values: Sequence[_Values]) -> list[_Values]:
    """Adds plans and ranks where runs with equal values differ in them."""
    completed = list(values)
    for indices in grouped((_key(own), index) for index, own in enumerate(values)).values():
        finished = [index for index in indices if runs[index].record.status == "finished"]
        more = dict(zip(finished, _varied([_plan_and_ranks(runs[index]) for index in finished]), strict=True))
        # Without values of its own the setting of a failed run is known by its plan alone.
        if not values[indices[0]]:
            plans = _varied([{"plan": runs[index].record.sync_method} for index in indices])
            more = {index: {**plan, **more.get(index, {})} for index, plan in zip(indices, plans, strict=True)}
        for index in indices:
            completed[index] = {**values[index], **more.get(index, {})}
        # The record of a failed run may hold only its plan, so the run joins the first setting with that plan.
        by_plan = {runs[index].record.sync_method: completed[index] for index in reversed(finished)}
        first = completed[finished[0]] if finished and values[indices[0]] else None
        for index in set(indices).difference(finished):
            completed[index] = by_plan.get(runs[index].record.sync_method, first or completed[index])
    return completed


def _plan_and_ranks(run: Run) -> dict[str, Value]:
    """Returns the plan and the ranks of a record, named as overrides."""
    strategy = {"strategy": "commopt_fsdp"} if run.settings.plan_type == "ShardedPlan" else {}
    plan = {name: value for name, value in (run.settings.plan or {}).items() if name != "comm_hook.name"}
    options = {f"strategy.{name}": value for name, value in plan.items()}
    ranks = {} if run.record.world_size is None else {"ranks": run.record.world_size}
    return {**strategy, "plan": run.record.sync_method, **options, **ranks}


def _splits_groups(name: str) -> bool:
    return name not in _NOT_SPLITTING and re.split(r"[./@]", name)[0] in _SPLITTING


_Settings = list[tuple[_Values, list[Run]]]  # the values of settings, and their runs


def _split(
    runs: Sequence[Run], values: Sequence[_Values], splits: Callable[[str], bool]
) -> list[tuple[_Values, _Settings]]:
    """Returns the runs by group and setting. Values of names that ``splits`` make a group, all others a setting."""
    groups: dict[object, tuple[_Values, dict[object, tuple[_Values, list[Run]]]]] = {}
    for run, own in zip(runs, values, strict=True):
        split = {name: value for name, value in sorted(own.items()) if splits(name)}
        rest = {name: value for name, value in sorted(own.items()) if not splits(name)}
        _, settings = groups.setdefault(_key(split), (split, {}))
        settings.setdefault(_key(rest), (rest, []))[1].append(run)
    return [(split, list(settings.values())) for split, settings in groups.values()]


def _group(name: str, split: _Values, settings: _Settings) -> GroupRuns:
    if len(settings) > 1:
        names = _unique_names([own for own, _ in settings])
    else:
        shown = ("strategy", "plan", "strategy.bucket_cap_mb", "ranks")
        known = _plan_and_ranks(settings[0][1][0])
        names = [setting_name({key: known[key] for key in shown if known.get(key) is not None})]
    finished, failed = [], []
    for setting, (own, runs) in zip(names, settings, strict=True):
        own_runs = [dataclasses.replace(run, group=name, setting=setting) for run in runs]
        failed += [run for run in own_runs if run.record.status == "failed"]
        own_finished = _number_repetitions([run for run in own_runs if run.record.status == "finished"])
        if own_finished:
            finished.append(_measure(setting, {**split, **own}, own_finished))
    return GroupRuns(name=name, settings=tuple(finished), failed=tuple(failed))


def _unique_names(options: Sequence[_Values]) -> list[str]:
    """Returns a name for each mapping, as short as is unique; empty for a single one."""
    if len(options) == 1:
        return [""]
    shown = _varied(options)
    names = [setting_name(values) for values in shown]
    overrides = [", ".join(f"{name}={text_of(value)}" for name, value in own.items()) for own in shown]
    for longer in ([setting_name(values, shows_off=True) for values in shown], overrides):
        counts = Counter(names)
        names = [name if counts[name] == 1 else long for name, long in zip(names, longer, strict=True)]
    unset = dict.fromkeys(canonical(name).rpartition(".")[2].replace("_", " ") for own in shown for name in own)
    return [name or f"default {', '.join(unset)}" for name in names]


def _number_repetitions(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Returns the runs of a setting by repetition, numbered without gaps."""
    values = [run.settings.get("repetition") for run in runs]
    repetitions = [value if isinstance(value, int) else 0 for value in values]
    order = sorted(range(len(runs)), key=repetitions.__getitem__)
    return tuple(dataclasses.replace(runs[index], repetition=number) for number, index in enumerate(order))


def _measure(name: str, values: _Values, runs: tuple[Run, ...]) -> Setting:
    """Returns a setting with the numbers of its own runs, before any comparison with others."""
    records = [run.record for run in runs]
    first, cap = records[0], runs[0].bucket_cap
    observed = [record for record in records if record.is_observed]
    counted = [record for record in records if record.wire_bytes_per_step] or observed
    wire_bytes = median_interval(record.wire_bytes_per_step for record in counted)
    peak_memory_bytes = median_interval(record.peak_memory_bytes for record in records)
    return Setting(
        name=name,
        values=values,
        sync_method=first.sync_method,
        world_size=first.world_size or 1,
        bucket_cap_mb=float(cap) if isinstance(cap, (int, float)) and not isinstance(cap, bool) else None,
        config_lines=config_lines(runs[0], values),
        runs=runs,
        samples_per_s=median_interval(run.throughput for run in runs),
        steps_per_s=median_interval(record.steps_per_s for record in records),
        step_s=median_interval(record.comm_time.get("step_s") for record in records),
        step_s_p95=median_interval(record.comm_time.get("step_s_p95") for record in records),
        comm_s=median_interval(record.comm_time.get("comm_s") for record in observed),
        exposed_s=median_interval(record.comm_time.get("exposed_s") for record in observed),
        exposed_share=median_interval(record.exposed_share for record in observed),
        wire_bytes=None if wire_bytes is None else wire_bytes.median,
        peak_memory_bytes=None if peak_memory_bytes is None else peak_memory_bytes.median,
        val_loss=median_interval(record.val_loss for record in records),
        val_accuracy=median_interval(record.val_accuracy for record in records),
        is_lossy=bool(first.is_lossy),
        num_diverged=sum(run.has_diverged for run in runs),
    )
