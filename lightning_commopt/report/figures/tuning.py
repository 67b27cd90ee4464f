"""Charts the search of ``plan="auto"``: the steps of each plan that it tried, and predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lightning_commopt.measure.runs.record import TriedPlan, Tuning
from lightning_commopt.report.figures.plot import Band, Plot, Point, Trace, linear_axis
from lightning_commopt.report.figures.style import (
    Chart,
    Line,
    PlanStyle,
    Rows,
    plan_styles,
    typical_run,
)
from lightning_commopt.report.model import Cell, Group
from lightning_commopt.text.formatting import Unit, number, short_percent, time_unit

_SHOWN_AFTER = 1.25  # steps drawn, as a multiple of the steps up to the last one with a time of its own
_HEIGHT = 280  # pixels
_TOP = 1.7  # upper edge of the plot, as a multiple of the median step of the slowest plan


def tuning_charts(group: Group, styles: Mapping[str, PlanStyle]) -> list[Chart]:
    """Returns a chart for each setting that chose its plan itself, of the run of median throughput."""
    runs = [(setting, run) for setting in group.settings if (run := typical_run(setting)) is not None]
    tunings = [(setting.name, run.tuning) for setting, run in runs if run.tuning is not None and run.tuning.history]
    is_alone = len(group.settings) == 1
    return [_chart("" if is_alone else f"{name}: ", tuning, styles) for name, tuning in tunings]


def _chart(prefix: str, tuning: Tuning, styles: Mapping[str, PlanStyle]) -> Chart:
    plans = [stretch.plan for stretch in tuning.history]
    keys = {plan: "none" if plan == "uncompressed" else plan for plan in plans}
    known = plan_styles([*styles, *keys.values()])
    looks = {plan: known[key] for plan, key in keys.items()}
    unit = time_unit(tuning.base_step_s or 0.0)
    cost = f"{'cost' if tuning.lost_steps >= 0 else 'saved'} the time of {number(abs(tuning.lost_steps))}"
    return Chart(
        title=f"{prefix}{_headline(tuning)}",
        note=" ".join([tuning.verdict, *(f"Step {step:,}: {event}." for step, event in tuning.events)]),
        x_title="steps of the fit (number)",
        y_title=f"time of a step, of the slowest rank ({unit.name})",
        plot=_plot(tuning, looks, unit),
        lines=tuple(Line(plan, style) for plan, style in looks.items()),
        rows=Rows(
            caption=f"Searching took {tuning.num_search_steps} steps and {cost}. Intervals are below the numbers.",
            columns=("plan", "predicted step", "measured step"),
            rows=[_row(candidate, tuning, unit) for candidate in tuning.candidates],
        ),
    )


def _headline(tuning: Tuning) -> str:
    first, chosen = tuning.history[0].plan, tuning.chosen
    if first == chosen:
        return f"Started and ended on {first}"
    gains = [
        candidate.gain for candidate in tuning.candidates if candidate.plan == chosen and candidate.gain is not None
    ]
    return f"Started on {first}, ended on {chosen}{f', saved {short_percent(gains[0][0])} of a step' if gains else ''}"


def _plot(tuning: Tuning, looks: Mapping[str, PlanStyle], unit: Unit) -> Plot:
    """Draws the steps up to the end of the last search and some more, in bands of their plans."""
    right = tuning.history[-1].end_step
    if len(looks) > 1:
        last = max((stretch.end_step for stretch in tuning.history if stretch.steps_per_number == 1), default=right)
        right = min(right, round(_SHOWN_AFTER * last))
    of_plans = {plan: _points(tuning, plan, right) for plan in looks}
    medians = [median(seconds for _, seconds, _ in points) for points in of_plans.values() if points]
    top = _TOP * max(medians, default=unit.size)
    bands = tuple(
        Band(looks[stretch.plan].color, x_ends=(stretch.first_step - 0.5, min(stretch.end_step, right) - 0.5))
        for stretch in tuning.history
        if stretch.first_step < right
    )
    traces = tuple(
        Trace(
            points=tuple(
                Point(
                    step,
                    float(f"{min(seconds, 0.98 * top) / unit.size:.5g}"),
                    f"{plan}, {f'step {step:,.0f}' if num == 1 else f'mean of {num} steps'}: {unit.text(seconds)}",
                )
                for step, seconds, num in points
            ),
            color=looks[plan].color,
            symbol=looks[plan].symbol,
        )
        for plan, points in of_plans.items()
    )
    return Plot(
        x=linear_axis([], ends=(-0.5, right - 0.5)),
        y=linear_axis([], ends=(0.0, top / unit.size)),
        traces=traces,
        bands=bands,
        height=_HEIGHT,
    )


def _points(tuning: Tuning, plan: str, right: float) -> list[tuple[float, float, int]]:
    """Returns a plan's points: the step, or the middle of several; their mean time; and their number."""
    points = [
        (stretch.first_step + (index + 0.5) * stretch.steps_per_number - 0.5, seconds, stretch.steps_per_number)
        for stretch in tuning.history
        for index, seconds in enumerate(stretch.seconds)
        if stretch.plan == plan and seconds is not None
    ]
    return [point for point in points if point[0] < right]


def _row(candidate: TriedPlan, tuning: Tuning, unit: Unit) -> tuple[Cell, ...]:
    """Returns a plan with the decision below it, what was predicted and what was measured."""
    gain = [0.0] if candidate is tuning.candidates[0] else candidate.gain or []
    measured = [] if tuning.base_step_s is None else [tuning.base_step_s * (1 - share) for share in gain]
    return (
        Cell(candidate.plan, _decision(candidate, tuning)),
        _cell(candidate.predicted_s or [], unit),
        _cell(measured, unit),
    )


def _decision(candidate: TriedPlan, tuning: Tuning) -> str:
    ends = (("started on", tuning.history[0].plan), ("ended on", tuning.chosen))
    words = [word for word, plan in ends if plan == candidate.plan]
    if words or candidate.gain is None:
        return " and ".join(words) or "not tried"
    if min(candidate.gain) <= 0 <= max(candidate.gain):
        return "tried: not sure"
    return "tried: faster" if candidate.gain[0] > 0 else "tried: slower"


def _cell(values: Sequence[float], unit: Unit) -> Cell:
    """Returns a time, and the ends of its interval below."""
    if not values:
        return Cell("-")
    return Cell(unit.text(values[0]), " to ".join(number(end / unit.size) for end in sorted(values[1:])))
