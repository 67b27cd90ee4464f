"""Settings that belong to one line of a chart, and the run that stands for a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commopt.report.model import Run, Setting
from lightning_commopt.report.names import canonical, distinct_name


@dataclass(frozen=True, kw_only=True)
class Series:
    """Settings that differ in nothing but the size of their buckets.

    Attributes:
        name: unique among those it was found with.
        sync_method: of the settings.
        settings: in the order of their bucket sizes; those without one come first.
    """

    name: str
    sync_method: str
    settings: tuple[Setting, ...]


def series_of(settings: Sequence[Setting]) -> list[Series]:
    """Returns the series that the settings make, in the order in which they come."""
    found: dict[tuple[object, ...], list[Setting]] = {}
    for setting in settings:
        key = setting.sync_method, setting.world_size, *sorted(_without_bucket_size(setting).items())
        found.setdefault(key, []).append(setting)
    values = [setting.values for setting in settings]
    return [
        Series(
            name=distinct_name(_without_bucket_size(members[0]), values, members[0].sync_method),
            sync_method=members[0].sync_method,
            settings=tuple(sorted(members, key=lambda setting: setting.bucket_cap_mb or 0.0)),
        )
        for members in found.values()
    ]


def typical_run(setting: Setting) -> Run | None:
    """Returns the run of median throughput, or the first where that is not known."""
    known = [run for run in setting.runs if run.record.samples_per_s is not None]
    known.sort(key=lambda run: run.record.samples_per_s or 0.0)
    return known[(len(known) - 1) // 2] if known else next(iter(setting.runs), None)


def _without_bucket_size(setting: Setting) -> dict[str, str]:
    return {name: value for name, value in setting.values.items() if canonical(name) != "bucket_cap_mb"}
