"""Draws the timeline of a typical step of each plan: the phases of every rank, with its buckets below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple, cast

from lightning_commopt.measure.files import RankRecords, common_steps, read_run
from lightning_commopt.measure.operations import OperationTotals, operation_columns, operation_rows
from lightning_commopt.measure.record import EXCHANGE, StepRecord, clock_shift_s
from lightning_commopt.report.choices import without_ranks
from lightning_commopt.report.figures.plot import linear_axis
from lightning_commopt.report.figures.style import Chart, Key, Lane, Part, Rows, Swatch, typical_run
from lightning_commopt.report.model import Cell, Group, Setting
from lightning_commopt.text.formatting import Unit, byte_unit, grouped, time_unit

MAX_SETTINGS = 8
_WARM_UP_SHARE = 0.2  # share of the steps that is left out if a run's record has no number of timed steps
KEYS = (
    Key("waiting", "a bucket is ready and waits in the queue"),
    Key("compressing", "it is being compressed or decompressed"),
    Key("wire", "it is on the wire"),
    Key("stalled", "exposed: backward has nothing left to compute"),
)

# Heights in pixels: a phase's bar, all buckets of a rank, and the most for one bucket.
_PHASE, _BUCKETS, _MAX_BUCKET = 20.0, 110.0, 12.0
# Buckets drawn in one chart; the ranks beyond are left out. A bucket takes about 300 bytes of the page, and the page is
# to have 300 kB at most.
_MAX_BUCKETS_SHOWN = 100


class TypicalStep(NamedTuple):
    """A step on all ranks that have records, in rising order; and how it was chosen."""

    setting: Setting
    ranks: Sequence[StepRecord]
    rank_numbers: Sequence[int]
    starts_s: Sequence[float]  # when the first rank begins the step, on the clock of each rank
    choice: str  # how the step was chosen, in words
    collectives: Sequence[tuple[str, ...]]  # `operation_rows` of the first rank, means over the steps chosen from


def typical_steps(group: Group) -> list[TypicalStep]:
    """Returns a step for each plan and bucket size that has records, in the order of the sweep."""
    steps = (_typical_step(setting) for setting in _settings_by_priority(group))
    typical = list(islice((step for step in steps if step is not None), MAX_SETTINGS))
    order = [id(setting) for setting in group.settings]
    return sorted(typical, key=lambda step: order.index(id(step.setting)))


def _settings_by_priority(group: Group) -> list[Setting]:
    """Returns the setting on most ranks for each plan and bucket size: each plan's fastest, slowest, then others."""
    several = [setting for setting in group.settings if setting.world_size > 1]
    settings: dict[tuple[object, ...], Setting] = {}
    for setting in several or group.settings:
        key = setting.sync_method, setting.bucket_cap_mb, *sorted(without_ranks(setting.values).items())
        if key not in settings or setting.world_size > settings[key].world_size:
            settings[key] = setting
    by_length = sorted(settings.values(), key=lambda own: own.step_s.median if own.step_s else float("inf"))
    by_plan = grouped((setting.sync_method, setting) for setting in by_length)
    fastest = [of_plan[0] for of_plan in by_plan.values()]
    slowest = [of_plan[-1] for of_plan in by_plan.values() if len(of_plan) > 1]
    return [*fastest, *slowest, *(setting for of_plan in by_plan.values() for setting in of_plan[1:-1])]


def _typical_step(setting: Setting) -> TypicalStep | None:
    run = typical_run(setting)
    if run is None or not run.has_steps:
        return None
    try:
        ranks = read_run(run.folder)
    except (OSError, ValueError):
        return None  # the reader of the sweep has reported it
    common = list(common_steps(ranks).values())
    timed = common[-(run.record.num_timed_steps or 0) :] if run.record.num_timed_steps else common
    timed = timed if len(timed) < len(common) else common[round(len(common) * _WARM_UP_SHARE) :]
    if not timed:
        return None
    by_length = sorted(timed, key=lambda step: step[0].totals.step_s)
    totals = OperationTotals()
    totals.add(first for first, *_ in timed)
    mean_s = fmean(first.totals.step_s for first, *_ in timed)
    typical = by_length[(len(by_length) - 1) // 2]
    shifts_s = [_shift_s(record, typical[0], rank, ranks[0]) for record, rank in zip(typical, ranks, strict=True)]
    start_s = min(record.start_s + shift_s for record, shift_s in zip(typical, shifts_s, strict=True))
    return TypicalStep(
        setting=setting,
        ranks=typical,
        rank_numbers=[records.rank for records in ranks],
        starts_s=[start_s - shift_s for shift_s in shifts_s],
        choice=f"the one of median length among the {len(timed):,} after warm-up",
        collectives=operation_rows(totals.operations(), mean_s),
    )


def _shift_s(record: StepRecord, first: StepRecord, rank: RankRecords, first_rank: RankRecords) -> float:
    """Returns the offset to the clock of the first rank, by buckets if possible, then by hosts' clocks."""
    shift_s = clock_shift_s([record], [first])
    return rank.origin_shift_s(first_rank) if shift_s is None else shift_s


_WORDS: dict[Swatch, str] = {"waiting": "in the queue", "compressing": "queue to average", "wire": "on the wire"}


def timelines(group: Group) -> list[Chart]:
    """Returns a chart for each plan and bucket size, all with the same time axis; none without records."""
    steps = typical_steps(group)
    ends_s = [
        record.end_s - start_s for step in steps for record, start_s in zip(step.ranks, step.starts_s, strict=True)
    ]
    return [_chart(step, max(ends_s)) for step in steps]


def _chart(step: TypicalStep, longest_s: float) -> Chart:
    unit = time_unit(longest_s)
    num_buckets = max(len(record.buckets) for record in step.ranks)
    num_ranks = min(len(step.ranks), max(1, _MAX_BUCKETS_SHOWN // max(1, num_buckets)))
    height = min(_MAX_BUCKET, _BUCKETS / num_buckets) if num_buckets else 0.0
    axis = linear_axis([], ends=(0.0, 1.005 * longest_s / unit.size))
    lanes: list[Lane] = []
    ranks = list(zip(step.rank_numbers, step.ranks, step.starts_s, strict=True))[:num_ranks]
    for number, record, start_s in ranks:
        scale = _Scale(start_s, 1.005 * longest_s, unit)
        lanes += [Lane(f"rank {number}", _phases(record, scale), _PHASE), *_buckets(record, scale, height)]
    note = f"Step {step.ranks[0].step:,} of the run, {unit.text(step.ranks[0].totals.step_s)}: {step.choice}."
    if num_ranks < len(step.ranks):
        note += f" {num_ranks} of {len(step.ranks)} ranks."
    return Chart(
        title=step.setting.name,
        note=note,
        x_title=f"time since the step began ({unit.name})",
        lanes=tuple(lanes),
        lane_axis=axis,
        rows=_collectives(step),
    )


def _collectives(step: TypicalStep) -> Rows | None:
    """Returns what the collectives of a step cost by phase; None if they are only DDP's own gradient sync."""
    if all(cells[:2] == ("backward", "all_reduce") for cells in step.collectives):
        return None
    return Rows(
        caption="Collectives of a step on the first rank, averaged over the steps after warm-up. Times may overlap.",
        columns=operation_columns(step.collectives)[1:],
        rows=[(Cell(operation, phase), *map(Cell, numbers)) for phase, operation, *numbers in step.collectives],
    )


class _Scale(NamedTuple):
    """The axis of a rank: where it begins on the rank's clock, how long it is, and the unit of what is written."""

    origin_s: float
    length_s: float
    unit: Unit

    def part(self, kind: Swatch, start_s: float, end_s: float, label: str, text: str = "") -> Part:
        """Returns a part between two times of the rank's clock, whose tooltip says what it is and how long it took."""
        # An exchange of DiLoCo may have begun before the step that waits for it.
        start, end = (max(0.0, at_s - self.origin_s) / self.length_s for at_s in (start_s, end_s))
        return Part(start, end, f"{label}: {self.unit.text(end_s - start_s)}", kind, text=text)


def _phases(record: StepRecord, scale: _Scale) -> tuple[Part, ...]:
    """Returns the phases of a step, and above them the exposed communication of each backward."""
    labelled = ("forward", "backward", "optimizer")
    parts = [
        scale.part(cast("Swatch", name), start_s, end_s, name, name if name in labelled else "")
        for name, start_s, end_s in record.phases
    ]
    for backward in dict.fromkeys(bucket.backward for bucket in record.buckets):
        if backward == EXCHANGE:
            parts += [scale.part("stalled", *wait, "exposed communication") for wait in record.waits]
            continue
        buckets = [bucket for bucket in record.buckets if bucket.backward == backward]
        start_s, end_s = max(bucket.ready_s for bucket in buckets), max(bucket.end_s for bucket in buckets)
        parts.append(scale.part("stalled", start_s, end_s, "exposed communication"))
    return tuple(parts)


def _buckets(record: StepRecord, scale: _Scale, height: float) -> list[Lane]:
    """Returns a lane for each bucket."""
    size = byte_unit(max((bucket.gradient_bytes for bucket in record.buckets), default=0))
    lanes = []
    for bucket in record.buckets:
        times: list[tuple[Swatch, float, float]] = [
            ("waiting", bucket.ready_s, bucket.start_s),
            ("compressing", bucket.start_s, bucket.end_s),
            *(("wire", start_s, end_s) for start_s, end_s in bucket.wire),
        ]
        kind = "exchange" if bucket.backward == EXCHANGE else "bucket"
        name = f"{kind} {bucket.index}, {size.text(bucket.gradient_bytes)}"
        parts = tuple(
            scale.part(kind, start_s, end_s, f"{name}, {_WORDS[kind]}")
            for kind, start_s, end_s in times
            if end_s > start_s
        )
        lanes.append(Lane("", parts, height))
    return lanes
