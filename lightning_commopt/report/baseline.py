"""Chooses the baseline of a group, and compares settings with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_commopt.report.intervals import Comparison, bucket_cap, compare, exposed_share_of, throughput
from lightning_commopt.report.model import Setting
from lightning_commopt.report.names import OFF, canonical, is_of_plan, is_ranks
from lightning_commopt.report.settings import repetition_key

_UNCOMPRESSED_DDP = ("none", "DDPStrategy")
_FIRST_VARIANT = "one_bucket"
_DEFAULT_BUCKET_MB = 25
_NEUTRAL = {"strategy": ("ddp", "commopt"), "trainer.accumulate_grad_batches": ("1",)}


def choose_baseline(settings: Sequence[Setting], name: str | None = None) -> Setting:
    """Returns the setting of the given name, if a group has it, or the natural baseline.

    That is one process, if ways to use several are compared, or only their number. Else DDP without compression on the
    most ranks, with the fewest options and the bucket size nearest to DDP's default. Else the first.
    """
    named = [setting for setting in settings if name is not None and setting.name.lower() == name.lower()]
    if named:
        return named[0]
    on_one = [setting for setting in settings if setting.world_size == 1]
    if on_one and _compares_numbers_of_ranks(settings):
        return on_one[0]
    variants = [setting for setting in settings if setting.values.get("variant") == _FIRST_VARIANT]
    plain = [setting for setting in settings if setting.sync_method in _UNCOMPRESSED_DDP and setting.world_size > 1]
    if variants or not plain:
        return (variants or list(settings))[0]
    return min(plain, key=lambda setting: (-setting.world_size, *_distance_from_default(setting)))


def compare_settings(setting: Setting, other: Setting) -> Comparison | None:
    """Compares the throughput of two settings, in pairs of runs of the same repetition.

    Without pairs if there are less than two, unless they are all runs of one of the settings.

    Returns:
        The ratio of ``setting`` over ``other``; None if one of the two has no throughput.
    """
    samples = [
        [(repetition_key(run), rate) for run in compared.runs if (rate := throughput(run)) is not None]
        for compared in (setting, other)
    ]
    ours, theirs = map(dict, samples)
    if not ours or not theirs:
        return None
    shared = [key for key in ours if key in theirs]
    is_unique = [len(ours), len(theirs)] == [len(sample) for sample in samples]
    if is_unique and len(shared) >= min(2, len(ours), len(theirs)):
        return compare([ours[key] for key in shared], [theirs[key] for key in shared], is_paired=True)
    return compare(*([rate for _, rate in sample] for sample in samples), is_paired=False)


def speedup_limit(setting: Setting, baseline: Setting) -> float | None:
    """Returns the largest speed-up that another plan can give: steps of the baseline without exposed communication.

    The run of the baseline that waited most counts. None if the two differ in more than the plan, or the exposed
    communication of the baseline is unknown.
    """
    shares = [share for run in baseline.runs if (share := exposed_share_of(run.record)) is not None]
    is_known = baseline.exposed_share is not None and setting.world_size == baseline.world_size > 1
    if not is_known or not shares or not differ_in_plan(setting, baseline):
        return None
    return 1 / (1 - max(shares)) if max(shares) < 1 else math.inf


def differ_in_plan(setting: Setting, other: Setting) -> bool:
    """Returns whether two settings differ only in the plan and the number of ranks."""
    options = setting.plan_options | other.plan_options
    names = setting.values.keys() | other.values.keys()
    return all(is_of_plan(name, options) for name in names if setting.values.get(name) != other.values.get(name))


def without_ranks(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of overrides without the number of ranks and of nodes."""
    return {
        name: value
        for name, value in values.items()
        if not is_ranks(name) and name not in ("trainer.num_nodes", "hosts")
    }


def _compares_numbers_of_ranks(settings: Sequence[Setting]) -> bool:
    if len({setting.world_size for setting in settings}) == 1:
        return False
    others = [without_ranks(setting.values) for setting in settings]
    return any("method" in values for values in others) or all(values == others[0] for values in others)


def _distance_from_default(setting: Setting) -> tuple[int, float]:
    options = [
        name
        for name, value in without_ranks(setting.values).items()
        if value.lower() not in (*OFF, *_NEUTRAL.get(name, ())) and canonical(name) != "comm_hook"
    ]
    if setting.bucket_cap_mb is None:
        return len(options), 0.0 if bucket_cap(setting.runs[0]) is None else math.inf
    return len(options), abs(setting.bucket_cap_mb - _DEFAULT_BUCKET_MB)
