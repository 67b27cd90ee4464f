"""Draws the timeline of a typical step of each plan: the phases of every rank, with its buckets below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from plotly import graph_objects as go

from lightning_commopt.measure.files import RankRecords, common_steps, read_run
from lightning_commopt.measure.operations import OperationTotals, operation_columns, operation_rows
from lightning_commopt.measure.record import StepRecord, clock_shift_s
from lightning_commopt.report.choices import without_ranks
from lightning_commopt.report.figures.style import EXPOSED, INK, SPAN_COLORS, Chart, Key, Rows, new_figure, typical_run
from lightning_commopt.report.model import Cell, Group, Setting
from lightning_commopt.text.formatting import Unit, byte_unit, grouped, number, time_unit

MAX_SETTINGS = 8
_WARM_UP_SHARE = 0.2  # share of the steps that is left out if a run's record has no number of timed steps
KEYS = (
    Key("waiting", "a bucket is ready and waits in the queue"),
    Key("compressing", "it is being compressed or decompressed"),
    Key("wire", "it is on the wire"),
    Key("stalled", "exposed: backward has nothing left to compute"),
)

# Heights in pixels: a phase's bar, all buckets of a rank, the most for one bucket, the gap between ranks, and the axis.
_PHASE, _BUCKETS, _MAX_BUCKET, _GAP, _AXIS = 20, 110, 12, 16, 50
_MAX_BUCKETS_SHOWN = 240  # buckets drawn in one chart; the ranks beyond are left out
_CLEAR = "rgba(0,0,0,0)"


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
    steps = (_typical_step(setting) for setting in _by_urgency(group))
    typical = list(islice((step for step in steps if step is not None), MAX_SETTINGS))
    order = [id(setting) for setting in group.settings]
    return sorted(typical, key=lambda step: order.index(id(step.setting)))


def _by_urgency(group: Group) -> list[Setting]:
    """Returns the setting on most ranks for each plan and bucket size: each plan's fastest, slowest, then others."""
    several = [setting for setting in group.settings if setting.world_size > 1]
    kept: dict[tuple[object, ...], Setting] = {}
    for setting in several or group.settings:
        key = setting.sync_method, setting.bucket_cap_mb, *sorted(without_ranks(setting.values).items())
        if key not in kept or setting.world_size > kept[key].world_size:
            kept[key] = setting
    by_length = sorted(kept.values(), key=lambda own: own.step_s.median if own.step_s else float("inf"))
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
    shifts_s = clock_shift_s([record], [first]), rank.origin_shift_s(first_rank), first.start_s - record.start_s
    return next(shift_s for shift_s in shifts_s if shift_s is not None)


_VERBS = {"waiting": "waits in the queue:", "compressing": "from the queue to the average:", "wire": "on the wire:"}


class _Span(NamedTuple):
    """A bar: its times, the center and height of its row, and its hover text."""

    kind: str
    start_s: float
    end_s: float
    center: float
    height: float
    hover: str


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
    bucket_height = min(_MAX_BUCKET, _BUCKETS / num_buckets) if num_buckets else 0
    num_ranks = min(len(step.ranks), max(1, _MAX_BUCKETS_SHOWN // max(1, num_buckets)))
    rank_height = _PHASE + 2 + num_buckets * bucket_height + _GAP
    figure = new_figure(num_ranks * rank_height + _AXIS)
    figure.update_yaxes(
        range=[num_ranks * rank_height, 0],
        showgrid=False,
        tickvals=[row * rank_height + _PHASE / 2 for row in range(num_ranks)],
        ticktext=[f"rank {number}" for number in step.rank_numbers[:num_ranks]],
    )
    figure.update_xaxes(range=[0, longest_s / unit.size * 1.005])
    spans = []
    for row, (record, start_s) in enumerate(zip(step.ranks[:num_ranks], step.starts_s, strict=False)):
        top = row * rank_height
        spans += _phases(record, start_s, top + _PHASE / 2, unit)
        spans += _buckets(record, start_s, top + _PHASE + 2, bucket_height, unit)
    for kind in dict.fromkeys(span.kind for span in spans):
        _draw(figure, [span for span in spans if span.kind == kind], unit)
    _name_phases(figure, spans, unit)
    note = f"Step {step.ranks[0].step:,} of the run, {unit.text(step.ranks[0].totals.step_s)}: {step.choice}."
    if num_ranks < len(step.ranks):
        note += f" {num_ranks} of {len(step.ranks)} ranks."
    return Chart(
        title=step.setting.name,
        note=note,
        x_title=f"time since the step began ({unit.name})",
        figure=figure,
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


def _phases(record: StepRecord, origin_s: float, center: float, unit: Unit) -> list[_Span]:
    spans = [
        _Span(name, start_s - origin_s, end_s - origin_s, center, _PHASE, f"{name}: {unit.text(end_s - start_s)}")
        for name, start_s, end_s in record.phases
    ]
    for backward in dict.fromkeys(bucket.backward for bucket in record.buckets):
        buckets = [bucket for bucket in record.buckets if bucket.backward == backward]
        start_s, end_s = max(bucket.ready_s for bucket in buckets), max(bucket.end_s for bucket in buckets)
        hover = f"exposed communication: {unit.text(end_s - start_s)}"
        spans.append(_Span("exposed", start_s - origin_s, end_s - origin_s, center, _PHASE, hover))
    return spans


def _buckets(record: StepRecord, origin_s: float, top: float, height: float, unit: Unit) -> list[_Span]:
    spans = []
    size = byte_unit(max((bucket.gradient_bytes for bucket in record.buckets), default=0))
    for row, bucket in enumerate(record.buckets):
        name = f"bucket {bucket.index}, {size.text(bucket.gradient_bytes)} of gradients"
        for kind, start_s, end_s in (
            ("waiting", bucket.ready_s, bucket.start_s),
            ("compressing", bucket.start_s, bucket.end_s),
            *(("wire", start_s, end_s) for start_s, end_s in bucket.wire),
        ):
            if end_s > start_s:
                hover = f"{name}<br>{_VERBS[kind]} {unit.text(end_s - start_s)}"
                if kind == "wire":
                    hover += f"; {size.text(bucket.wire_bytes)} in all"
                start_s, end_s = start_s - origin_s, end_s - origin_s
                spans.append(_Span(kind, start_s, end_s, top + (row + 0.5) * height, height * 0.86, hover))
    return spans


def _draw(figure: go.Figure, spans: Sequence[_Span], unit: Unit) -> None:
    """Draws all spans of one kind."""
    kind = spans[0].kind
    marker: dict[str, object] = {"color": SPAN_COLORS.get(kind, _CLEAR), "line": {"width": 0}}
    if kind == "exposed":
        marker["pattern"] = {"shape": "/", "fgcolor": EXPOSED, "size": 6, "solidity": 0.35, "bgcolor": _CLEAR}
    if kind == "waiting":
        marker["line"] = {"width": 0.7, "color": "#9aa7b4"}
    figure.add_bar(
        **_positions(spans, unit),
        name=kind,
        marker=marker,
        hovertext=[
            f"{span.hover}<br>from {number(span.start_s / unit.size)} to {unit.text(span.end_s)}" for span in spans
        ],
        hoverinfo="text",
    )


def _name_phases(figure: go.Figure, spans: Sequence[_Span], unit: Unit) -> None:
    """Writes the names of phases into their bars, above everything else."""
    named = [span for span in spans if span.kind in ("forward", "backward", "optimizer")]
    figure.add_bar(
        **_positions(named, unit),
        name="names",
        marker={"color": _CLEAR},
        text=[span.kind for span in named],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        insidetextfont={"color": INK, "size": 12},
        hoverinfo="skip",
    )
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 11})


def _positions(spans: Sequence[_Span], unit: Unit) -> dict[str, object]:
    """Returns the positions of bars, to six digits."""
    return {
        "orientation": "h",
        "base": [float(f"{span.start_s / unit.size:.6g}") for span in spans],
        "x": [float(f"{(span.end_s - span.start_s) / unit.size:.6g}") for span in spans],
        "y": [span.center for span in spans],
        "width": [span.height for span in spans],
    }
