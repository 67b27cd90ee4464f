"""Compares settings: the baseline of a group, speed-ups over it, and throughput against ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_commopt.measure.runs.settings import Value
from lightning_commopt.report.choices import canonical, is_of_plan, is_off, without_ranks
from lightning_commopt.report.intervals import Comparison, Interval, compare
from lightning_commopt.report.model import Scaling, Setting
from lightning_commopt.report.names import distinct_name

_UNCOMPRESSED_DDP = ("none", "DDPStrategy")
_STOCK_FSDP2 = "ModelParallelStrategy"
_FIRST_VARIANT = "one_bucket"
_DEFAULT_BUCKET_MB = 25
_NEUTRAL: dict[str, tuple[Value, ...]] = {"strategy": ("ddp", "commopt"), "trainer.accumulate_grad_batches": (1,)}


def choose_baseline(settings: Sequence[Setting], name: str | None = None) -> Setting:
    """Returns the setting of the given name, if a group has it, or the natural baseline.

    The natural baseline is one process if the settings are ways to use several processes, or differ only in their
    number. Otherwise it is DDP without compression on the most ranks, with the fewest options and the bucket size
    nearest to DDP's default; beside `CommOptModelParallel` also Lightning's FSDP2. If there is none, it is the first
    setting.
    """
    chosen = [setting for setting in settings if name is not None and setting.name.lower() == name.lower()]
    if chosen:
        return chosen[0]
    on_one = [setting for setting in settings if setting.world_size == 1]
    if on_one and _compares_numbers_of_ranks(settings):
        return on_one[0]
    variants = [setting for setting in settings if setting.values.get("variant") == _FIRST_VARIANT]
    has_fsdp2 = any(setting.runs[0].settings.plan_type == "ShardedPlan" for setting in settings)
    methods = (*_UNCOMPRESSED_DDP, *((_STOCK_FSDP2,) if has_fsdp2 else ()))
    plain = [setting for setting in settings if setting.sync_method in methods and not setting.is_lossy]
    plain = [setting for setting in plain if setting.world_size > 1]
    if variants or not plain:
        return (variants or list(settings))[0]
    return min(plain, key=lambda setting: (-setting.world_size, *_distance_from_default(setting)))


def compare_settings(setting: Setting, other: Setting) -> Comparison | None:
    """Returns the ratio of two settings' throughputs; None if one has no throughput."""
    samples = samples_of(setting, other)
    return None if samples is None else compare(samples.ours, samples.theirs, is_paired=samples.is_paired)


class Samples(NamedTuple):
    """Throughputs of two settings, neither empty; in pairs of the same repetition, or not."""

    ours: list[float]
    theirs: list[float]
    is_paired: bool


def samples_of(setting: Setting, other: Setting) -> Samples | None:
    """Returns what two settings are compared by; None if one has no throughput.

    Runs of the same repetition are compared in pairs. If there are less than two pairs, and these are not all runs of
    one of the settings, the runs are compared without pairs.
    """
    samples = rates_of(setting), rates_of(other)
    ours, theirs = map(dict, samples)
    if not ours or not theirs:
        return None
    shared = [key for key in ours if key in theirs]
    is_unique = [len(ours), len(theirs)] == [len(sample) for sample in samples]
    if is_unique and len(shared) >= min(2, len(ours), len(theirs)):
        return Samples([ours[key] for key in shared], [theirs[key] for key in shared], is_paired=True)
    return Samples([rate for _, rate in samples[0]], [rate for _, rate in samples[1]], is_paired=False)


def rates_of(setting: Setting) -> list[tuple[object, float]]:
    """Returns the repetition and the throughput of each run that has one."""
    return [(run.repetition_key, rate) for run in setting.runs if (rate := run.throughput) is not None]


def loss_change(setting: Setting, baseline: Setting) -> Interval | None:
    """Returns the change of a setting's final loss against the baseline's median, as a share of it.

    The ends are those of the setting's own losses, so for the baseline they are the band in which a change is noise.
    None if one of the two has no loss, or a run diverged, or the baseline's loss is zero.
    """
    ours, theirs = setting.val_loss, baseline.val_loss
    if ours is None or theirs is None or not theirs.median or setting.num_diverged or baseline.num_diverged:
        return None

    def change(loss: float | None) -> float | None:
        return None if loss is None else (loss - theirs.median) / abs(theirs.median)

    low, high = change(ours.low), change(ours.high)
    median = (ours.median - theirs.median) / abs(theirs.median)
    return Interval(median=median, low=low, high=high, num_values=ours.num_values)


def speedup_limit(setting: Setting, baseline: Setting) -> float | None:
    """Returns the largest speed-up that another plan can give: steps of the baseline without exposed communication.

    The run of the baseline that waited most counts. None if the two differ in more than the plan, or the exposed
    communication of the baseline is unknown.
    """
    shares = [share for run in baseline.runs if (share := run.record.exposed_share) is not None]
    is_known = baseline.exposed_share is not None and setting.world_size == baseline.world_size > 1
    if not is_known or not shares or not differ_in_plan(setting, baseline):
        return None
    return 1 / (1 - max(shares)) if max(shares) < 1 else math.inf


def differ_in_plan(setting: Setting, other: Setting) -> bool:
    """Returns whether two settings differ only in the plan and the number of ranks."""
    options = setting.plan_options | other.plan_options
    names = setting.values.keys() | other.values.keys()
    return all(is_of_plan(name, options) for name in names if setting.values.get(name) != other.values.get(name))


def _compares_numbers_of_ranks(settings: Sequence[Setting]) -> bool:
    if len({setting.world_size for setting in settings}) == 1:
        return False
    others = [without_ranks(setting.values) for setting in settings]
    return any("method" in values for values in others) or all(values == others[0] for values in others)


def _distance_from_default(setting: Setting) -> tuple[int, float, bool]:
    options = [
        name
        for name, value in without_ranks(setting.values).items()
        if not is_off(value) and value not in _NEUTRAL.get(name, ()) and canonical(name) != "comm_hook"
    ]
    if setting.bucket_cap_mb is None:
        distance = 0.0 if setting.runs[0].bucket_cap is None else math.inf
    else:
        distance = abs(setting.bucket_cap_mb - _DEFAULT_BUCKET_MB)
    return len(options), distance, setting.sync_method == _STOCK_FSDP2


def find_scalings(settings: Sequence[Setting]) -> tuple[Scaling, ...]:
    """Returns a curve for each plan of a group that ran on several numbers of ranks.

    Every curve includes one process, of the same plan if possible. Without one process, speed-ups are over the fewest
    ranks of the plan.
    """
    curves = []
    for series in _series(settings):
        base = one_process_for(series[-1], settings) or series[0]
        points = [(base.world_size, Interval(median=1.0, low=None, high=None, num_values=len(base.runs)))]
        for setting in series:
            comparison = compare_settings(setting, base)
            if setting.world_size > base.world_size and comparison is not None:
                points.append((setting.world_size, comparison.ratio))
        if len(points) < 2:
            continue
        num_ranks, speedups = zip(*points, strict=True)
        medians = [speedup.median for speedup in speedups]
        serial_share = amdahl_serial_share(num_ranks, medians) if base.world_size == 1 else None
        name = scaling_name(series[0], settings)
        curves.append(Scaling(sync_method=name, num_ranks=num_ranks, speedups=speedups, serial_share=serial_share))
    return tuple(curves)


def scaling_name(setting: Setting, settings: Sequence[Setting]) -> str:
    """Returns a name for a setting's plan on any number of ranks, which no other plan of its group has."""
    return distinct_name(without_ranks(setting.values), [other.values for other in settings], setting.sync_method)


def amdahl_serial_share(num_ranks: Sequence[int], speedups: Sequence[float]) -> float | None:
    """Fits f of Amdahl's law, 1 / speed-up = f + (1 - f) / ranks, by least squares of 1 / speed-up.

    Points of one rank do not count. f is below 0 if the speed-up is better than linear; None with less than two points.

    >>> round(amdahl_serial_share([1, 2, 4], [1, 1 / 0.55, 1 / 0.325]), 6)
    0.1
    """
    points = [(1 - 1 / ranks, 1 / speedup - 1 / ranks) for ranks, speedup in zip(num_ranks, speedups, strict=True)]
    beyond_one = [(x, y) for x, y in points if x > 0]
    if len(beyond_one) < 2:
        return None
    return sum(x * y for x, y in beyond_one) / sum(x * x for x, _ in beyond_one)


def one_process_for(setting: Setting, settings: Sequence[Setting]) -> Setting | None:
    """Returns the setting on one rank that a setting's efficiency refers to.

    It has the same plan, or else is the first that differs only in how gradients travel. None if all others differ in
    more, such as the batch size.
    """
    on_one = [other for other in settings if other.world_size == 1 and other.samples_per_s is not None]
    comparable = [other for other in on_one if values_beside_plan(other) == values_beside_plan(setting)]
    same_plan = [other for other in comparable if without_ranks(other.values) == without_ranks(setting.values)]
    return next(iter([*same_plan, *comparable] if setting.world_size > 1 else comparable), None)


def values_beside_plan(setting: Setting) -> dict[str, Value]:
    """Returns the values that say what is trained, and not how gradients travel or on how many ranks."""
    values = without_ranks(setting.values)
    return {
        name: value
        for name, value in values.items()
        if not is_of_plan(name, setting.plan_options) and not name.startswith(("strategy", "trainer.strategy"))
    }


def _series(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Returns, for each plan that ran on several numbers of ranks, its settings in the order of these numbers.

    If a number of ranks was spread over nodes in several ways, the setting on the fewest nodes counts.
    """
    by_plan: dict[object, dict[int, Setting]] = {_key(setting): {} for setting in settings}
    for setting in sorted(settings, key=lambda other: (other.world_size, _num_nodes(other))):
        if setting.samples_per_s is not None:
            by_plan[_key(setting)].setdefault(setting.world_size, setting)
    # A method that ran on one number of ranks makes a curve too, as its curve begins at one process.
    return [
        series
        for series in (list(by_ranks.values()) for by_ranks in by_plan.values())
        if len(series) > 1 or (series and "method" in series[0].values and series[0].world_size > 1)
    ]


def _key(setting: Setting) -> object:
    return frozenset(without_ranks(setting.values).items())


def _num_nodes(setting: Setting) -> int:
    num_nodes = setting.values.get("trainer.num_nodes")
    return num_nodes if isinstance(num_nodes, int) else 1
