"""Which runs repeat the same setting, what to call it, and which settings can be compared."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_commopt.report.model import Run
from lightning_commopt.report.runs import FoundRuns
from lightning_commopt.report.words import canonical, is_ranks, setting_name

_WITHOUT_EFFECT = (
    *("repetition", "repeat", "num_warmup_steps", "hydra", "logger", "callbacks.progress_bar"),
    *("trainer.logger", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps"),
    *("trainer.default_root_dir", "callbacks.comm_time.print_summary"),
)
_SEEDS = ("seed", "random_seed", "seed_everything")
_CHOICES_OF_NOTHING = ("experiment", "variant", "method", "link", "hosts")
_SPLITTING = ("model", "data", "datamodule", "link", "hosts", "experiment")
_NOT_SPLITTING = ("data.batch_size", "model.activation_checkpointing")
_ON_ONE_PROCESS = ("one_process", "ddp_one_process")
_Values = tuple[tuple[str, str], ...]
_FIRST_PART = re.compile(r"[./@]")


@dataclass(frozen=True, kw_only=True)
class RunsOfSetting:
    """The runs that differ in nothing but repetition and seed.

    Attributes:
        name: unique in its group.
        values: what the report's runs vary, name to value.
        runs: finished, by repetition.
    """

    name: str
    values: Mapping[str, str]
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class RunsOfGroup:
    """Settings that can be compared.

    Attributes:
        name: empty if it is the only one.
        settings: in the order of their first runs.
        failed: runs without a result.
    """

    name: str
    settings: tuple[RunsOfSetting, ...]
    failed: tuple[Run, ...]


def group_runs(found: FoundRuns) -> list[RunsOfGroup]:
    """Sorts runs into settings and groups, in the order in which they were found.

    A setting is what the overrides say, without those that do not change the training; where they are equal and the
    runs were not (another launcher, no Hydra), what the records say.
    """
    runs = [*found.finished, *found.failed]
    values = _varied([_effective(run.overrides) for run in runs])
    values = _told_apart(runs, values)
    groups = _split(runs, values, _splits_groups)
    if all(len(settings) == 1 and not any(settings) for settings in groups.values()):
        # Experiments of somebody else's, one for each plan: they are what is to be compared.
        groups = _split(runs, values, lambda name: _splits_groups(name) and name != "experiment")
    group_names = _names([dict(split) for split in groups])
    return [
        _group(name, dict(split), settings) for name, (split, settings) in zip(group_names, groups.items(), strict=True)
    ]


def _split(
    runs: Sequence[Run], values: Sequence[Mapping[str, str]], splits: Callable[[str], bool]
) -> dict[_Values, dict[_Values, list[Run]]]:
    """Returns the runs of each setting of each group, by the values of what splits and of what does not."""
    groups: dict[_Values, dict[_Values, list[Run]]] = {}
    for run, own in zip(runs, values, strict=True):
        split = tuple(sorted((name, value) for name, value in own.items() if splits(name)))
        rest = tuple(sorted((name, value) for name, value in own.items() if not splits(name)))
        groups.setdefault(split, {}).setdefault(rest, []).append(run)
    return groups


def turn(run: Run) -> tuple[str, str, str]:
    """Returns what a run shares with those of other settings that were made in the same repetition of a sweep."""
    repetition = run.overrides.get("repetition", f"the {run.repetition}th")
    seeds = " ".join(f"{name}={value}" for name, value in sorted(run.overrides.items()) if is_seed(name))
    return str(run.folder.parent), seeds, repetition


def changes_training(name: str) -> bool:
    """Returns whether an override can change what is trained, other than as another repetition of it."""
    return not is_seed(name) and not any(
        name == other or name.startswith((f"{other}.", f"{other}/")) for other in _WITHOUT_EFFECT
    )


def is_seed(name: str) -> bool:
    """Returns whether an option is the seed of a run."""
    return name.rpartition(".")[2] in _SEEDS


def _effective(overrides: Mapping[str, str]) -> dict[str, str]:
    """Returns the overrides that change the training."""
    kept = {
        name: value
        for name, value in overrides.items()
        if changes_training(name) and not (name in _CHOICES_OF_NOTHING and value in ("null", ""))
    }
    if kept.get("variant", kept.get("method")) in _ON_ONE_PROCESS:
        kept = {name: value for name, value in kept.items() if not is_ranks(name)}
    return kept


def _varied(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns of each mapping the entries that are not the same in all."""
    names = dict.fromkeys(name for values in options for name in values)
    varying = [name for name in names if len({values.get(name) for values in options}) > 1]
    return [{name: values[name] for name in varying if name in values} for values in options]


def _told_apart(runs: Sequence[Run], values: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Adds what the records say where equal overrides made different runs."""
    alike: dict[str, list[int]] = {}
    for index, own in enumerate(values):
        alike.setdefault(json.dumps(own, sort_keys=True), []).append(index)
    told = list(values)
    for indices in alike.values():
        finished = [index for index in indices if runs[index].record.status == "finished"]
        plans = [{"plan": runs[index].record.plan_name} for index in indices]
        # Overrides say what a failed run was, if there are any.
        told_plans = dict(zip(indices, _varied(plans if not values[indices[0]] else [{} for _ in plans]), strict=True))
        said = _varied([_of_record(runs[index]) for index in finished])
        for index, more in zip(finished, said, strict=True):
            told[index] = {**values[index], **told_plans[index], **more}
        # Of a failed run the record may know no more than its plan: it belongs to the first setting with that.
        by_plan = {runs[index].record.plan_name: told[index] for index in reversed(finished)}
        for index in set(indices).difference(finished):
            told[index] = by_plan.get(runs[index].record.plan_name, {**values[index], **told_plans[index]})
    return told


def _of_record(run: Run) -> dict[str, str]:
    """Returns what a record says of its plan, in the words of overrides."""
    plan = _flat(run.record.plan or {})
    plan.pop("comm_hook.name", None)
    ranks = {} if run.record.world_size is None else {"world_size": str(run.record.world_size)}
    return {"plan": run.record.plan_name, **{f"strategy.{name}": value for name, value in plan.items()}, **ranks}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    leaves: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            leaves |= _flat(inner, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = inner if isinstance(inner, str) else json.dumps(inner)
    return leaves


def _splits_groups(name: str) -> bool:
    return name not in _NOT_SPLITTING and _FIRST_PART.split(name)[0] in _SPLITTING


def _group(
    name: str, split: Mapping[str, str], settings: Mapping[tuple[tuple[str, str], ...], Sequence[Run]]
) -> RunsOfGroup:
    names = _names([dict(own) for own in settings]) if len(settings) > 1 else []
    if not names:
        names = [_name_of_the_only_one(next(iter(settings.values()))[0])]
    finished, failed = [], []
    for setting, (own, runs) in zip(names, settings.items(), strict=True):
        named = [dataclasses.replace(run, group=name, setting=setting) for run in runs]
        failed += [run for run in named if run.record.status == "failed"]
        of_setting = _numbered([run for run in named if run.record.status == "finished"])
        if of_setting:
            finished.append(RunsOfSetting(name=setting, values={**split, **dict(own)}, runs=of_setting))
    return RunsOfGroup(name=name, settings=tuple(finished), failed=tuple(failed))


def _names(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a name for each mapping, the short one where it is the only one of its kind."""
    if len(options) == 1:
        return [""]
    # What is the same in all of them distinguishes none; a missing value does.
    shown = _varied(options)
    short, long = zip(*(setting_name(values) for values in shown), strict=True)
    names = _unless_unique(short, long)
    names = _unless_unique(names, [", ".join(f"{name}={value}" for name, value in own.items()) for own in shown])
    return [name or _nothing_set(shown) for name in names]


def _unless_unique(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    counts = Counter(names)
    return [name if counts[name] == 1 else long for name, long in zip(names, longer, strict=True)]


def _nothing_set(options: Iterable[Mapping[str, str]]) -> str:
    """Returns what to call the one that leaves to their defaults what the others set."""
    names = dict.fromkeys(canonical(name).rpartition(".")[2].replace("_", " ") for values in options for name in values)
    return f"default {', '.join(names)}"


def _name_of_the_only_one(run: Run) -> str:
    """Returns what to call a setting that nothing has to be told apart from."""
    record = run.record
    values = {"plan": record.plan_name}
    cap = (record.plan or {}).get("bucket_cap_mb")
    if cap is not None:
        values["strategy.bucket_cap_mb"] = json.dumps(cap)
    if record.world_size is not None:
        values["world_size"] = str(record.world_size)
    return setting_name(values)[0]


def _numbered(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Returns the runs of a setting by repetition, each with a number of its own."""
    said = [int(value) if (value := run.overrides.get("repetition", "0")).isdecimal() else 0 for run in runs]
    order = sorted(range(len(runs)), key=lambda index: said[index])
    return tuple(dataclasses.replace(runs[index], repetition=place) for place, index in enumerate(order))
