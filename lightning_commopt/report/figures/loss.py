"""Charts the loss against steps, which shows the price of compression, and against seconds, which shows its gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_commopt.measure.runs.losses import LossPoint
from lightning_commopt.report.figures.plot import Plot, Point, Trace, extent, linear_axis, log_axis
from lightning_commopt.report.figures.style import Chart, Line, PlanStyle, line_styles, typical_run
from lightning_commopt.report.model import Group, Setting
from lightning_commopt.report.names import in_quotes, join_names
from lightning_commopt.text.formatting import number

MAX_CURVES = 8
_SAME_LOSS = 0.005  # relative difference up to which final losses count as the same
_MAX_POINTS = 160
_SMOOTHED_SHARE = 0.02  # reach of the moving average to either side, as a share of the points
_LOG_RATIO = 3.0  # ratio of the largest to the smallest loss above which the axis is logarithmic

_Axis = Literal["step", "seconds"]


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """The points of a setting before its first loss that is not finite, and the step of this loss."""

    setting: Setting
    train: tuple[LossPoint, ...]
    val: tuple[LossPoint, ...]
    diverged_at: int | None

    @property
    def last(self) -> LossPoint:
        """The last point, preferably of a validation."""
        return max([*self.train[-1:], *self.val[-1:]], key=lambda point: (point.step, point.kind == "val"))


def loss_curves(group: Group, styles: Mapping[str, PlanStyle]) -> list[Chart]:
    """Returns the loss against steps and against seconds; empty without curves."""
    all_curves = [curve for setting in group.settings if (curve := _curve(setting)) is not None]
    if not all_curves:
        return []
    first = [setting.name for setting in (group.baseline, group.recommended, group.fastest) if setting is not None]

    def priority(curve: _Curve) -> tuple[bool, float]:
        rate = curve.setting.samples_per_s
        return curve.setting.name not in first, -rate.median if rate else 0.0

    distinct = _distinct(sorted(all_curves, key=priority))
    curves = [curve for curve in all_curves if any(curve is shown for shown in distinct[:MAX_CURVES])]
    looks = line_styles([curve.setting.sync_method for curve in curves], styles)
    note = "Lines: training, smoothed. Markers: validation."
    if len(distinct) < len(all_curves):
        note += f" {len(distinct)} of {len(all_curves)} settings: of each plan, one for each final loss."
    if len(curves) < len(distinct):
        note += f" {len(distinct) - len(curves)} more are left out: the slower ones."
    if any(len(curve.setting.runs) > 1 for curve in curves):
        note += " Of repetitions, the run of median throughput."
    drawn = [curve.setting.name for curve in all_curves]
    never = [s.name for s in group.settings if s.name not in drawn and any(run.losses for run in s.runs)]
    if never:
        note += f" Never finite: the loss of {join_names(never)}."
    for curve in curves:
        if curve.diverged_at is not None:
            note += f" The loss of {in_quotes(curve.setting.name)} is NaN from step {curve.diverged_at:,} on."
    losses = [point.loss for curve in curves for point in (*curve.train, *curve.val)]
    is_log = min(losses) > 0 and max(losses) / min(losses) > _LOG_RATIO
    axes: dict[_Axis, tuple[str, str]] = {
        "step": ("Loss against steps", "optimizer steps (number)"),
        "seconds": ("Loss against seconds", "time of training, without validation (s)"),
    }
    return [
        Chart(
            title=title,
            note=note,
            x_title=x_title,
            y_title="loss (in the model's own unit, logarithmic)" if is_log else "loss (in the model's own unit)",
            plot=_plot(curves, looks, axis, is_log),
            lines=tuple(Line(curve.setting.name, style) for curve, style in zip(curves, looks, strict=True)),
        )
        for axis, (title, x_title) in axes.items()
    ]


def _curve(setting: Setting) -> _Curve | None:
    typical = typical_run(setting)
    runs = [run for run in (typical, *setting.runs) if run is not None and run.losses]
    if not runs:
        return None
    losses = runs[0].losses
    end = next((index for index, point in enumerate(losses) if not math.isfinite(point.loss)), len(losses))
    points = losses[:end]
    if not points:
        return None
    train = _smooth([point for point in points if point.kind == "train"])
    val = tuple(point for point in points if point.kind == "val")
    return _Curve(setting=setting, train=train, val=val, diverged_at=losses[end].step if end < len(losses) else None)


def _distinct(curves: Sequence[_Curve]) -> list[_Curve]:
    """Returns the first curve of each plan and final loss; the size of buckets does not change the loss."""
    distinct: list[_Curve] = []
    for curve in curves:
        is_new = all(
            curve.setting.sync_method != other.setting.sync_method
            or curve.diverged_at != other.diverged_at
            or abs(_final(curve) - _final(other)) > _SAME_LOSS * abs(_final(other))
            for other in distinct
        )
        if is_new:
            distinct.append(curve)
    return distinct


def _final(curve: _Curve) -> float:
    return curve.setting.val_loss.median if curve.setting.val_loss else curve.last.loss


def _smooth(points: Sequence[LossPoint]) -> tuple[LossPoint, ...]:
    """Returns moving averages of the loss, at as many points as a screen can show."""
    reach = round(len(points) * _SMOOTHED_SHARE)
    stride = max(1, math.ceil(len(points) / _MAX_POINTS))
    smoothed = []
    for at in sorted({*range(0, len(points), stride), len(points) - 1} if points else ()):
        near = min(reach, at, len(points) - 1 - at)
        around = points[at - near : at + near + 1]
        smoothed.append(replace(points[at], loss=sum(point.loss for point in around) / len(around)))
    return tuple(smoothed)


def _plot(curves: Sequence[_Curve], looks: Sequence[PlanStyle], axis: _Axis, is_log: bool) -> Plot:
    traces = []
    pairs = zip(curves, looks, strict=True)
    kinds = [(c, style, *own) for c, style in pairs for own in ((c.train, "training"), (c.val, "validation"))]
    for curve, style, points, kind in kinds:
        if not points:
            continue
        is_line = kind == "training" and len(points) > 1
        last = f"{curve.setting.name}: {kind} loss {number(points[-1].loss, 4)} at step {points[-1].step:,}"
        places = tuple(
            Point(
                round(getattr(point, axis), 4),
                float(f"{point.loss:.5g}"),
                ""
                if is_line
                else f"{curve.setting.name}: {kind} loss {number(point.loss, 4)} at step {point.step:,},"
                f" {number(point.seconds)} s",
            )
            for point in points
        )
        look = {"dash": style.dash, "width": 1.6, "hover": last} if is_line else {"symbol": style.symbol}
        traces.append(Trace(points=places, color=style.color, **look))
    across, losses = extent(traces)
    return Plot(
        x=linear_axis(across, from_zero=True),
        y=log_axis(losses) if is_log else linear_axis(losses),
        traces=tuple(traces),
    )
