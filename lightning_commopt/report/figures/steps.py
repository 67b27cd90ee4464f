"""Chooses the steps to show: one of typical length for each plan and size of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightning_commopt.measure.files import RankRecords, read_run
from lightning_commopt.measure.operations import OperationTotals
from lightning_commopt.measure.record import Phase, StepRecord, clock_shift_s
from lightning_commopt.measure.summary import operation_rows
from lightning_commopt.report.baseline import without_ranks
from lightning_commopt.report.figures.style import typical_run
from lightning_commopt.report.model import Group, Run, Setting

MAX_SETTINGS = 8
_WARM_UP_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class TypicalStep:
    """A step on all ranks that have records, in rising order, on the clock of the first; and how it was chosen.

    Attributes:
        collectives: see `operation_rows`: of the first rank, in the mean of the steps that it was chosen among.
    """

    setting: Setting
    number: int
    rank_numbers: tuple[int, ...]
    ranks: tuple[StepRecord, ...]
    choice: str
    collectives: Sequence[tuple[str, ...]]

    @property
    def origin_s(self) -> float:
        """Its start on the first rank to begin it."""
        return min(record.start_s for record in self.ranks)


def typical_steps(group: Group) -> list[TypicalStep]:
    """Returns a step for each plan and bucket size that has records, in the order of the sweep."""
    found = []
    for setting in _by_urgency(group):
        run = typical_run(setting)
        step = _typical_step(setting, run) if run is not None else None
        if step is not None:
            found.append(step)
        if len(found) == MAX_SETTINGS:
            break
    order = [id(setting) for setting in group.settings]
    return sorted(found, key=lambda step: order.index(id(step.setting)))


def _by_urgency(group: Group) -> list[Setting]:
    """Returns the setting on most ranks for each plan and bucket size: of each plan fastest, slowest, others."""
    several = [setting for setting in group.settings if setting.world_size > 1]
    kept: dict[tuple[object, ...], Setting] = {}
    for setting in several or group.settings:
        key = setting.sync_method, setting.bucket_cap_mb, *sorted(without_ranks(setting.values).items())
        if key not in kept or setting.world_size > kept[key].world_size:
            kept[key] = setting
    by_plan: dict[str, list[Setting]] = {}
    for setting in sorted(kept.values(), key=lambda own: own.step_s.median if own.step_s else float("inf")):
        by_plan.setdefault(setting.sync_method, []).append(setting)
    fastest = [of_plan[0] for of_plan in by_plan.values()]
    slowest = [of_plan[-1] for of_plan in by_plan.values() if len(of_plan) > 1]
    return [*fastest, *slowest, *(setting for of_plan in by_plan.values() for setting in of_plan[1:-1])]


def _typical_step(setting: Setting, run: Run) -> TypicalStep | None:
    if not run.has_steps:
        return None
    try:
        ranks = read_run(run.folder)
    except (OSError, ValueError):
        return None  # the reader of the sweep has reported it
    steps = [{record.step: record for record in records.steps} for records in ranks]
    common = sorted(set.intersection(*(set(of_rank) for of_rank in steps)))
    timed = common[-(run.record.num_timed_steps or 0) :] if run.record.num_timed_steps else common
    timed = timed if len(timed) < len(common) else common[round(len(common) * _WARM_UP_SHARE) :]
    if not timed:
        return None
    by_length = sorted(timed, key=lambda number: steps[0][number].totals.step_s)
    totals = OperationTotals()
    totals.add(steps[0][number] for number in timed)
    mean_s = fmean(steps[0][number].totals.step_s for number in timed)
    number = by_length[(len(by_length) - 1) // 2]
    return TypicalStep(
        setting=setting,
        number=number,
        rank_numbers=tuple(records.rank for records in ranks),
        ranks=_align([of_rank[number] for of_rank in steps], ranks),
        choice=f"the one of median length among the {len(timed):,} after warm-up",
        collectives=operation_rows(totals.operations(), mean_s),
    )


def _align(records: Sequence[StepRecord], ranks: Sequence[RankRecords]) -> tuple[StepRecord, ...]:
    """Puts a step's records on the clock of the first rank."""
    found = []
    for record, rank in zip(records, ranks, strict=True):
        by_buckets, by_origins = clock_shift_s([record], records[:1]), rank.origin_shift_s(ranks[0])
        by_starts = records[0].start_s - record.start_s
        found.append(_shift(record, next(s for s in (by_buckets, by_origins, by_starts) if s is not None)))
    return tuple(found)


def _shift(record: StepRecord, shift_s: float) -> StepRecord:
    buckets = [
        replace(
            bucket,
            ready_s=bucket.ready_s + shift_s,
            start_s=bucket.start_s + shift_s,
            end_s=bucket.end_s + shift_s,
            wire=tuple((start_s + shift_s, end_s + shift_s) for start_s, end_s in bucket.wire),
        )
        for bucket in record.buckets
    ]
    phases = [Phase(name, start_s + shift_s, end_s + shift_s) for name, start_s, end_s in record.phases]
    return replace(record, phases=tuple(phases), buckets=tuple(buckets))
