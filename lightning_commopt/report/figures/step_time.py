"""What a step is spent on: computing, and waiting for gradients; what overlap hides, and what it could."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_commopt.report.figures.chart import Chart, Key
from lightning_commopt.report.figures.labels import plain
from lightning_commopt.report.figures.rows import new_rows
from lightning_commopt.report.figures.style import COMPUTING, EXPOSED, HIDDEN, QUIET, UNUSED, PlanStyle
from lightning_commopt.report.figures.units import percent, time_unit
from lightning_commopt.report.model import Group, Setting


class _Step(NamedTuple):
    """Seconds of a setting's step."""

    setting: Setting
    step_s: float
    comm_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.comm_s - self.exposed_s)

    @property
    def computing_s(self) -> float:
        return max(0.0, self.step_s - self.exposed_s)

    @property
    def share(self) -> float:
        return self.exposed_s / self.step_s if self.step_s else 0.0


def step_parts(group: Group) -> Chart | None:
    """Returns a stacked bar for each setting, those that wait most first; None without any records of steps."""
    steps = sorted(_steps(group), key=lambda step: -step.share)
    if not steps:
        return None
    most_s = max(step.step_s for step in steps)
    unit = time_unit(most_s)
    rows = new_rows(
        [step.setting.name for step in steps],
        [f"{percent(step.share)} exposed" for step in steps],
        x_title=f"time of a step ({unit.name})",
        most=most_s / unit.size,
    )
    for name, color, pattern, parts_s in (
        ("computing", COMPUTING, "", [step.computing_s - min(step.hidden_s, step.computing_s) for step in steps]),
        ("hidden", HIDDEN, "/", [min(step.hidden_s, step.computing_s) for step in steps]),
        ("exposed", EXPOSED, "", [step.exposed_s for step in steps]),
    ):
        rows.figure.add_bar(
            orientation="h",
            name=name,
            x=[part_s / unit.size for part_s in parts_s],
            y=rows.centers,
            width=rows.bar_height,
            marker={
                "color": color,
                "pattern": {"shape": pattern, "fgcolor": "#ffffff", "size": 5, "solidity": 0.25},
            },
            hovertext=[
                f"<b>{plain(step.setting.name)}</b><br>{_MEANINGS[name]}:"
                f" {unit.text(part_s)} of {unit.text(step.step_s)}"
                for step, part_s in zip(steps, parts_s, strict=True)
            ],
            hoverinfo="text",
        )
    rows.figure.update_layout(barmode="stack")
    return Chart(
        title="Exposed communication",
        note="Where the time of a step goes: the mean over steps and ranks. The settings that wait most come first.",
        figure=rows.figure,
        keys=tuple(Key(name, text) for name, text in _MEANINGS.items()),  # type: ignore[arg-type]
    )


_MEANINGS = {
    "computing": "computing",
    "hidden": "computing, and gradients travel meanwhile",
    "exposed": "exposed: waiting for gradients",
}


def overlap(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns what overlap saves beside its bound; None where nothing was exchanged."""
    steps = sorted((step for step in _steps(group) if step.comm_s > 0), key=lambda step: -step.hidden_s)
    if not steps:
        return None
    bounds_s = [min(step.computing_s, step.comm_s) for step in steps]
    most_s = max(*bounds_s, *(step.hidden_s for step in steps))
    unit = time_unit(most_s)
    rows = new_rows(
        [step.setting.name for step in steps],
        [f"{unit.text(step.hidden_s)} of {unit.text(bound_s)}" for step, bound_s in zip(steps, bounds_s, strict=True)],
        x_title=f"time saved by overlap, of a step ({unit.name})",
        most=most_s / unit.size * 1.01,
    )
    hover = [
        f"<b>{plain(step.setting.name)}</b><br>communication: {unit.text(step.comm_s)}, exposed "
        f"{unit.text(step.exposed_s)}<br>saved by overlap: {unit.text(step.hidden_s)}<br>at most: {unit.text(bound_s)}"
        for step, bound_s in zip(steps, bounds_s, strict=True)
    ]
    colors = [styles[step.setting.plan_name].color for step in steps]
    for lengths_s, marker in (
        (bounds_s, {"color": UNUSED, "line": {"color": QUIET, "width": 1}}),
        ([step.hidden_s for step in steps], {"color": colors}),
    ):
        rows.figure.add_bar(
            orientation="h",
            x=[length_s / unit.size for length_s in lengths_s],
            y=rows.centers,
            width=rows.bar_height,
            marker=marker,
            hovertext=hover,
            hoverinfo="text",
        )
    return Chart(
        title="Time saved by overlap",
        note="What backward hides of the communication. The bound is min(Tc/N, Tcomm).",
        figure=rows.figure,
        keys=(Key("bound", "the most that can be saved: the computing, or the communication, whichever is shorter"),),
    )


def _steps(group: Group) -> list[_Step]:
    return [
        _Step(each, each.step_s.median, each.comm_s.median, each.exposed_s.median)
        for each in group.settings
        if each.step_s is not None and each.comm_s is not None and each.exposed_s is not None
    ]
