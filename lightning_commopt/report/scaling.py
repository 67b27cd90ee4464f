"""Throughput against ranks, and the fit of Amdahl's law."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightning_commopt.report.baseline import compare_settings, without_ranks
from lightning_commopt.report.model import Interval, Scaling, Setting
from lightning_commopt.report.names import distinct_name, is_of_plan


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

    Args:
        num_ranks: of each point; points of one rank do not count.
        speedups: over one rank, of the same points.

    Returns:
        f, which is below 0 if the speed-up is better than linear. None with less than two points.

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

    That is the one of the same plan, else the first that differs only in how gradients travel. None if all others
    differ in more, such as the batch size.
    """
    on_one = [other for other in settings if other.world_size == 1 and other.samples_per_s is not None]
    alike = [other for other in on_one if _without_plan(other) == _without_plan(setting)]
    same = [other for other in alike if without_ranks(other.values) == without_ranks(setting.values)]
    return next(iter([*same, *alike] if setting.world_size > 1 else alike), None)


def _without_plan(setting: Setting) -> dict[str, str]:
    values = without_ranks(setting.values)
    return {
        name: value
        for name, value in values.items()
        if not is_of_plan(name, setting.plan_options) and not name.startswith(("strategy", "trainer.strategy"))
    }


def _series(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Returns the settings that differ only in the number of ranks, in its order, for each plan with several numbers.

    Of several layouts of as many ranks it is that on the fewest nodes.
    """
    alike: dict[str, dict[int, Setting]] = {}
    for setting in settings:
        alike.setdefault(json.dumps(without_ranks(setting.values), sort_keys=True), {})
    for setting in sorted(settings, key=lambda other: (other.world_size, _num_nodes(other))):
        if setting.samples_per_s is not None:
            key = json.dumps(without_ranks(setting.values), sort_keys=True)
            alike[key].setdefault(setting.world_size, setting)
    # Methods are compared with one process, also on a single other number of ranks.
    return [
        series
        for series in (list(by_ranks.values()) for by_ranks in alike.values())
        if len(series) > 1 or (series and "method" in series[0].values and series[0].world_size > 1)
    ]


def _num_nodes(setting: Setting) -> int:
    num_nodes = setting.values.get("trainer.num_nodes", "1")
    return int(num_nodes) if num_nodes.isdecimal() else 1
