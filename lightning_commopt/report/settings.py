"""Which runs repeat the same setting, what to call it, and which settings can be compared."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.measure.runs.settings import text_of
from lightning_commopt.report.model import Run
from lightning_commopt.report.names import OFF, canonical, is_ranks, setting_name
from lightning_commopt.report.runs import FoundRuns

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

    A setting is what was chosen in any of the runs and can change the training, resolved; where that is equal and the
    runs were not (another launcher, no Hydra), their plans and numbers of ranks as well.
    """
    runs = [*found.finished, *found.failed]
    names = dict.fromkeys(name for run in runs for name in run.record.chosen if changes_training(name))
    values = _with_plans(runs, _varied([_chosen(run, names) for run in runs]))
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
    chosen = {name: text_of(run.settings.get(name)) for name in run.record.chosen}
    seeds = " ".join(f"{name}={value}" for name, value in sorted(chosen.items()) if is_seed(name))
    return str(run.folder.parent), seeds, chosen.get("repetition", f"the {run.repetition}th")


def changes_training(name: str) -> bool:
    """Returns whether an override can change what is trained, other than as another repetition of it."""
    return not is_seed(name) and not any(
        name == other or name.startswith((f"{other}.", f"{other}/")) for other in _WITHOUT_EFFECT
    )


def is_seed(name: str) -> bool:
    """Returns whether an option is the seed of a run."""
    return name.rpartition(".")[2] in _SEEDS


def chosen_settings(run: Run) -> dict[str, str]:
    """Returns everything that was set for a run and could have changed the training, also what all runs have."""
    return {name: text_of(run.settings.get(name)) for name in run.record.chosen if changes_training(name)}


def _chosen(run: Run, names: Iterable[str]) -> dict[str, str]:
    """Returns the values of settings, with the ranks that there were instead of those that were asked for."""
    values = {name: text_of(run.settings[name]) for name in names if name in run.settings}
    kept = {name: value for name, value in values.items() if not (name in _CHOICES_OF_NOTHING and value in OFF)}
    if kept.get("variant", kept.get("method")) in _ON_ONE_PROCESS:
        return {name: value for name, value in kept.items() if not is_ranks(name)}
    if run.record.world_size is None or not any(map(is_ranks, names)):
        return kept
    others = {name: value for name, value in kept.items() if not is_ranks(name)}
    return {**others, "ranks": str(run.record.world_size)}


def _varied(options: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns of each mapping the entries that are not the same in all."""
    names = dict.fromkeys(name for values in options for name in values)
    varying = [name for name in names if len({values.get(name) for values in options}) > 1]
    return [{name: values[name] for name in varying if name in values} for values in options]


def _with_plans(runs: Sequence[Run], values: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Adds plans and ranks where equal choices made different runs."""
    alike: dict[str, list[int]] = {}
    for index, own in enumerate(values):
        alike.setdefault(json.dumps(own, sort_keys=True), []).append(index)
    completed = list(values)
    for indices in alike.values():
        finished = [index for index in indices if runs[index].record.status == "finished"]
        more = dict(zip(finished, _varied([_plan_and_ranks(runs[index]) for index in finished]), strict=True))
        if not values[indices[0]]:  # else what was chosen says what a failed run was
            plans = _varied([{"plan": runs[index].record.sync_method} for index in indices])
            more = {index: {**plan, **more.get(index, {})} for index, plan in zip(indices, plans, strict=True)}
        for index in indices:
            completed[index] = {**values[index], **more.get(index, {})}
        # Of a failed run the record may know no more than its plan: it belongs to the first setting with that.
        by_plan = {runs[index].record.sync_method: completed[index] for index in reversed(finished)}
        first = completed[finished[0]] if finished and values[indices[0]] else None
        for index in set(indices).difference(finished):
            completed[index] = by_plan.get(runs[index].record.sync_method, first or completed[index])
    return completed


def _plan_and_ranks(run: Run) -> dict[str, str]:
    """Returns what a record says of its plan, in the words of a command line."""
    plan = {name.partition(".")[2]: value for name, value in run.settings.items() if name.startswith("plan.")}
    plan.pop("comm_hook.name", None)
    ranks = {} if run.record.world_size is None else {"ranks": str(run.record.world_size)}
    return {
        "plan": run.record.sync_method,
        **{f"strategy.{name}": text_of(value) for name, value in plan.items()},
        **ranks,
    }


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
        of_setting = _number_repetitions([run for run in named if run.record.status == "finished"])
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
    """Returns the name of a setting that has no others beside it."""
    values = {"plan": run.record.sync_method}
    cap = run.settings.get("plan.bucket_cap_mb")
    if cap is not None:
        values["strategy.bucket_cap_mb"] = text_of(cap)
    if run.record.world_size is not None:
        values["ranks"] = str(run.record.world_size)
    return setting_name(values)[0]


def _number_repetitions(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Returns the runs of a setting by repetition, each with a number of its own."""
    values = [text_of(run.settings.get("repetition", 0)) for run in runs]
    repetitions = [int(value) if value.isdecimal() else 0 for value in values]
    order = sorted(range(len(runs)), key=repetitions.__getitem__)
    return tuple(dataclasses.replace(runs[index], repetition=place) for place, index in enumerate(order))
