"""Sorts runs into settings, whose runs differ in repetition and seed alone, and groups of comparable settings.

Also writes the lines of configuration that reproduce a setting.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from lightning_commopt.measure.runs.settings import nested, text_of
from lightning_commopt.report.intervals import median_interval
from lightning_commopt.report.model import Run, Setting
from lightning_commopt.report.names import OFF, canonical, is_ranks, setting_name
from lightning_commopt.report.runs import FoundRuns
from lightning_commopt.text.formatting import grouped

# Overrides that cannot change what is trained, themselves or below them.
_WITHOUT_EFFECT = (
    *("repetition", "repeat", "num_warmup_steps", "hydra", "logger", "callbacks.progress_bar"),
    *("trainer.logger", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps"),
    *("trainer.default_root_dir", "callbacks.comm_time.print_summary"),
)
_OPTIONAL_CHOICES = ("experiment", "variant", "method", "link", "hosts")  # disabling these is not choosing them

# Runs that differ in one of these cannot be compared, so they make separate groups. The exceptions are what a user
# varies to make the same training faster.
_SPLITTING = ("model", "data", "datamodule", "link", "hosts", "experiment")
_NOT_SPLITTING = ("data.batch_size", "model.activation_checkpointing")
_ON_ONE_PROCESS = ("one_process", "ddp_one_process")
_CONFIG_GROUPS = re.compile(
    r".*[/@].*|(variant|method|experiment|model|data|strategy|callbacks|trainer|commopt|plan|world_size)"
)
_STRATEGIES = ("strategy.", "trainer.strategy.")
_Values = tuple[tuple[str, str], ...]


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
    names = dict.fromkeys(name for run in runs for name in run.record.chosen if changes_training(name))
    values = _add_plans(runs, _varied([_chosen_values(run, names) for run in runs]))
    groups = _split(runs, values, _splits_groups)
    if all(len(settings) == 1 and not any(settings) for settings in groups.values()):
        # If every experiment chose just one plan, the experiments themselves are what the user wants to compare.
        groups = _split(runs, values, lambda name: _splits_groups(name) and name != "experiment")
    group_names = _unique_names([dict(split) for split in groups])
    return [
        _group(name, dict(split), settings) for name, (split, settings) in zip(group_names, groups.items(), strict=True)
    ]


def repetition_key(run: Run) -> tuple[str, str, str]:
    """Returns a key that is equal for runs of different settings in the same repetition of a sweep."""
    chosen = {name: text_of(run.settings.get(name)) for name in run.record.chosen}
    seeds = " ".join(f"{name}={value}" for name, value in sorted(chosen.items()) if is_seed(name))
    return str(run.folder.parent), seeds, chosen.get("repetition", f"number {run.repetition}")


def changes_training(name: str) -> bool:
    """Returns whether an override can change what is trained, apart from repeating it with another seed."""
    return not is_seed(name) and not any(
        name == other or name.startswith((f"{other}.", f"{other}/")) for other in _WITHOUT_EFFECT
    )


def is_seed(name: str) -> bool:
    """Returns whether an option is the seed of a run."""
    return name.rpartition(".")[2] in ("seed", "random_seed", "seed_everything")


def chosen_settings(run: Run) -> dict[str, str]:
    """Returns all overrides of a run that can change the training, even if all runs share them."""
    return {name: text_of(run.settings.get(name)) for name in run.record.chosen if changes_training(name)}


def _chosen_values(run: Run, names: Iterable[str]) -> dict[str, str]:
    """Returns the values of settings, with the actual number of ranks."""
    values = {name: text_of(run.settings[name]) for name in names if name in run.settings}
    values = {name: value for name, value in values.items() if not (name in _OPTIONAL_CHOICES and value in OFF)}
    is_on_one = values.get("variant", values.get("method")) in _ON_ONE_PROCESS
    if not is_on_one and (run.record.world_size is None or not any(map(is_ranks, names))):
        return values
    values = {name: value for name, value in values.items() if not is_ranks(name)}
    return values if is_on_one else {**values, "ranks": str(run.record.world_size)}


def _varied(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns each mapping with only the names whose values differ between the mappings."""
    names = dict.fromkeys(name for values in options for name in values)
    varying = [name for name in names if len({values.get(name) for values in options}) > 1]
    return [{name: values[name] for name in varying if name in values} for values in options]


def _add_plans(runs: Sequence[Run], values: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Adds plans and ranks where runs with equal values differ in them."""
    alike = grouped((json.dumps(own, sort_keys=True), index) for index, own in enumerate(values))
    completed = list(values)
    for indices in alike.values():
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


def _plan_and_ranks(run: Run) -> dict[str, str]:
    """Returns the plan and the ranks of a record, named as overrides."""
    plan = {name.partition(".")[2]: value for name, value in run.settings.items() if name.startswith("plan.")}
    plan.pop("comm_hook.name", None)
    ranks = {} if run.record.world_size is None else {"ranks": str(run.record.world_size)}
    options = {f"strategy.{name}": text_of(value) for name, value in plan.items()}
    return {"plan": run.record.sync_method, **options, **ranks}


def _splits_groups(name: str) -> bool:
    return name not in _NOT_SPLITTING and re.split(r"[./@]", name)[0] in _SPLITTING


def _split(
    runs: Sequence[Run], values: Sequence[Mapping[str, str]], splits: Callable[[str], bool]
) -> dict[_Values, dict[_Values, list[Run]]]:
    """Returns the runs by group and setting. Values of names that ``splits`` make a group, all others a setting."""
    groups: dict[_Values, dict[_Values, list[Run]]] = {}
    for run, own in zip(runs, values, strict=True):
        split = tuple(sorted((name, value) for name, value in own.items() if splits(name)))
        rest = tuple(sorted((name, value) for name, value in own.items() if not splits(name)))
        groups.setdefault(split, {}).setdefault(rest, []).append(run)
    return groups


def _group(name: str, split: Mapping[str, str], settings: Mapping[_Values, Sequence[Run]]) -> GroupRuns:
    if len(settings) > 1:
        names = _unique_names([dict(own) for own in settings])
    else:
        (runs,) = settings.values()
        shown = ("plan", "strategy.bucket_cap_mb", "ranks")
        known = _plan_and_ranks(runs[0])
        names = [setting_name({key: known[key] for key in shown if known.get(key, "null") != "null"})]
    finished, failed = [], []
    for setting, (own, runs) in zip(names, settings.items(), strict=True):
        named = [dataclasses.replace(run, group=name, setting=setting) for run in runs]
        failed += [run for run in named if run.record.status == "failed"]
        own_finished = _number_repetitions([run for run in named if run.record.status == "finished"])
        if own_finished:
            finished.append(_measure(setting, {**split, **dict(own)}, own_finished))
    return GroupRuns(name=name, settings=tuple(finished), failed=tuple(failed))


def _unique_names(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a name for each mapping, as short as is unique; empty for a single one."""
    if len(options) == 1:
        return [""]
    shown = _varied(options)
    names = [setting_name(values) for values in shown]
    overrides = [", ".join(f"{name}={value}" for name, value in own.items()) for own in shown]
    for longer in ([setting_name(values, shows_off=True) for values in shown], overrides):
        counts = Counter(names)
        names = [name if counts[name] == 1 else long for name, long in zip(names, longer, strict=True)]
    unset = dict.fromkeys(canonical(name).rpartition(".")[2].replace("_", " ") for own in shown for name in own)
    return [name or f"default {', '.join(unset)}" for name in names]


def _number_repetitions(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Returns the runs of a setting by repetition, numbered without gaps."""
    values = [text_of(run.settings.get("repetition", 0)) for run in runs]
    repetitions = [int(value) if value.isdecimal() else 0 for value in values]
    order = sorted(range(len(runs)), key=repetitions.__getitem__)
    return tuple(dataclasses.replace(runs[index], repetition=number) for number, index in enumerate(order))


def _measure(name: str, values: Mapping[str, str], runs: tuple[Run, ...]) -> Setting:
    """Returns a setting with the numbers of its own runs, before any comparison with others."""
    records = [run.record for run in runs]
    first, cap = records[0], bucket_cap(runs[0])
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
        comm_s=median_interval(record.comm_time.get("comm_s") for record in observed),
        exposed_s=median_interval(record.comm_time.get("exposed_s") for record in observed),
        exposed_share=median_interval(record.exposed_share for record in observed),
        wire_bytes=None if wire_bytes is None else wire_bytes.median,
        peak_memory_bytes=None if peak_memory_bytes is None else peak_memory_bytes.median,
        val_loss=median_interval(record.val_loss for record in records),
        val_accuracy=median_interval(record.val_accuracy for record in records),
        is_lossy=bool(first.is_lossy),
        num_diverged=sum(record.val_loss is not None and not math.isfinite(record.val_loss) for record in records),
    )


def bucket_cap(run: Run) -> Any:
    """Returns ``bucket_cap_mb`` of the run's strategy: a number, several, or None for the default."""
    nodes = ("plan",) if run.record.plan is not None else ("strategy", "trainer.strategy")
    caps = (run.settings.get(f"{node}.bucket_cap_mb") for node in nodes)
    return next((cap for cap in caps if cap is not None), None)


def link_of(run: Run) -> str | None:
    """Returns the rate of the links between the hosts of a run, in words; None without such links."""
    link = run.settings.get("link")
    return None if link is None else setting_name({"link": text_of(link)}) or None


def config_lines(run: Run, varied: Mapping[str, str]) -> tuple[str, ...]:
    """Returns YAML for a configuration, with the command line and Python as comments.

    It has the node ``strategy`` (in users' projects often ``trainer.strategy``) and other values that were varied.
    """
    known = {name: value for name, value in run.settings.items() if value is not None}
    strategy = next(filter(None, (nested(known, prefix) for prefix in _STRATEGIES)), {})
    # A compressor without a registered name was recorded by its repr, which YAML cannot make again.
    has_unnamed_compressor = "plan.comm_hook" in run.settings
    plan = None
    if run.record.plan is not None:
        plan = nested({name: run.settings[name] for name in run.record.plan}, "plan.")
        if run.record.sync_method == "auto":
            plan |= {"plan": "auto", **{name: strategy[name] for name in ("lossy",) if name in strategy}}
        strategy = {"_target_": "lightning_commopt.CommOptDDP", **plan}
    others = {}
    for name in run.record.chosen:
        is_group = _CONFIG_GROUPS.fullmatch(name) or any(other.startswith(f"{name}.") for other in run.settings)
        is_varied = name in varied or ("ranks" in varied and is_ranks(name))
        if is_varied and not is_group and not name.startswith(_STRATEGIES):
            others[name] = run.settings.get(name)
    nodes = {**({"strategy": strategy} if strategy and not has_unnamed_compressor else {}), **nested(others)}
    chosen = zip(run.record.overrides, run.record.chosen, strict=False)
    words = [override for override, name in chosen if changes_training(name)]
    lines = [f"# on the command line: {shlex.join(words)}"] if words else []
    lines += yaml.safe_dump(nodes, sort_keys=False, width=1000).splitlines() if nodes else []
    if plan is not None:
        code = {"comm_hook"} if has_unnamed_compressor else set()
        arguments = ", ".join(f"{name}={value if name in code else repr(value)}" for name, value in plan.items())
        lines.append(f"# in Python: CommOptDDP({arguments})")
    return tuple(lines)
