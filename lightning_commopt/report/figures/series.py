"""Settings that belong to one line of a chart, and the run that stands for a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_commopt.report.model import Group, Run, Scaling, Setting
from lightning_commopt.report.words import canonical, is_ranks, setting_name, spelled


@dataclass(frozen=True, kw_only=True)
class Series:
    """Settings that differ in nothing but the size of their buckets.

    Attributes:
        name: unique among those it was found with.
        plan_name: of the settings.
        settings: in the order of their bucket sizes; those without one come first.
    """

    name: str
    plan_name: str
    settings: tuple[Setting, ...]


def series_of(settings: Sequence[Setting]) -> list[Series]:
    """Returns the series that the settings make, in the order in which they come."""
    found: dict[tuple[object, ...], list[Setting]] = {}
    for setting in settings:
        others = {name: value for name, value in setting.values.items() if not _is_bucket_size(name)}
        found.setdefault((setting.plan_name, setting.world_size, *sorted(others.items())), []).append(setting)
    return [
        Series(
            name=_told(members[0], settings, is_bucket_size_told=False),
            plan_name=members[0].plan_name,
            settings=tuple(sorted(members, key=lambda setting: setting.bucket_cap_mb or 0.0)),
        )
        for members in found.values()
    ]


def without_ranks(setting: Setting) -> tuple[object, ...]:
    """Returns what settings have in common that differ in nothing but the number of ranks."""
    values = sorted((name, value) for name, value in setting.values.items() if not is_ranks(name))
    return setting.plan_name, setting.bucket_cap_mb, *values


def plan_of(scaling: Scaling, group: Group) -> str:
    """Returns the name of the plan that a scaling is of, by what it is called."""
    told = {_told(setting, group.settings, are_ranks_told=False): setting.plan_name for setting in group.settings}
    return told.get(scaling.plan_name, scaling.plan_name)


def typical_run(setting: Setting) -> Run | None:
    """Returns the run of median throughput, or the first where that is not known."""
    known = [run for run in setting.runs if run.record.samples_per_s is not None]
    known.sort(key=lambda run: run.record.samples_per_s or 0.0)
    return known[(len(known) - 1) // 2] if known else next(iter(setting.runs), None)


def _told(
    setting: Setting, settings: Sequence[Setting], *, is_bucket_size_told: bool = True, are_ranks_told: bool = True
) -> str:
    """Returns what tells a setting from the others."""
    values: Mapping[str, str] = {
        name: value
        for name, value in setting.values.items()
        if any(other.values.get(name) != value for other in settings)
        and (is_bucket_size_told or not _is_bucket_size(name))
        and (are_ranks_told or not is_ranks(name))
    }
    return (setting_name(values)[0] if values else "") or spelled(setting.plan_name)


def _is_bucket_size(name: str) -> bool:
    return canonical(name) == "bucket_cap_mb"
