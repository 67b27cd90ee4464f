"""What a step is spent on: computing, and waiting for gradients; what overlap hides, and what it could."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_commopt.report.figures.chart import Bar, Chart, Key, Part
from lightning_commopt.report.figures.style import PlanStyle
from lightning_commopt.report.figures.units import Unit, percent, time_unit
from lightning_commopt.report.model import Group, Setting

_PARTS = (
    Key("computing", "computing"),
    Key("hidden", "computing, and gradients travel meanwhile"),
    Key("exposed", "exposed: waiting for gradients"),
)
_LEAST_SHARE = 1e-6  # of a step; less is what rounding left


class _Step(NamedTuple):
    """Seconds of a setting's step, and the share of it that is exposed."""

    setting: Setting
    step_s: float
    comm_s: float
    exposed_s: float
    share: float

    @property
    def hidden_s(self) -> float:
        hidden_s = self.comm_s - self.exposed_s
        return hidden_s if hidden_s > _LEAST_SHARE * self.step_s else 0.0

    @property
    def computing_s(self) -> float:
        return max(0.0, self.step_s - self.exposed_s)


def step_parts(group: Group) -> Chart | None:
    """Returns a stacked bar for each setting, those that wait most first; None without any records of steps."""
    steps = sorted(_steps(group), key=lambda step: -step.share)
    if not steps:
        return None
    most_s = max(step.step_s for step in steps)
    unit = time_unit(most_s)
    return Chart(
        title="Exposed communication",
        note="Where the time of a step goes: the mean over steps and ranks. The settings that wait most come first.",
        x_title=f"time of a step ({unit.name})",
        bars=tuple(
            Bar(step.setting.name, f"{percent(step.share)} exposed", _parts(step, most_s, unit)) for step in steps
        ),
        keys=_PARTS,
    )


def _parts(step: _Step, most_s: float, unit: Unit) -> tuple[Part, ...]:
    hidden_s = min(step.hidden_s, step.computing_s)
    parts, start_s = [], 0.0
    for key, part_s in zip(_PARTS, (step.computing_s - hidden_s, hidden_s, step.exposed_s), strict=True):
        hover = f"{step.setting.name}: {key.text}, {unit.text(part_s)} of {unit.text(step.step_s)}"
        parts.append(Part(start_s / most_s, (start_s + part_s) / most_s, hover, key.swatch))
        start_s += part_s
    return tuple(parts)


def overlap(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns what overlap saves beside its bound; None where nothing was exchanged."""
    steps = sorted((step for step in _steps(group) if step.comm_s > 0), key=lambda step: -step.hidden_s)
    if not steps:
        return None
    bounds_s = [min(step.computing_s, step.comm_s) for step in steps]
    most_s = max(*bounds_s, *(step.hidden_s for step in steps))
    unit = time_unit(most_s)
    bars = []
    for step, bound_s in zip(steps, bounds_s, strict=True):
        saved = f"{unit.text(step.hidden_s)} of {unit.text(bound_s)}"
        hover = (
            f"{step.setting.name}: communication {unit.text(step.comm_s)}, exposed {unit.text(step.exposed_s)};"
            f" saved by overlap {saved}"
        )
        parts = (
            Part(0, bound_s / most_s, hover, "bound"),
            Part(0, step.hidden_s / most_s, hover, color=styles[step.setting.plan_name].color),
        )
        bars.append(Bar(step.setting.name, saved, parts))
    return Chart(
        title="Time saved by overlap",
        note="What backward hides of the communication. The bound is min(Tc/N, Tcomm).",
        x_title=f"time saved by overlap, of a step ({unit.name})",
        bars=tuple(bars),
        keys=(Key("bound", "the most that can be saved: the computing, or the communication, whichever is shorter"),),
    )


def _steps(group: Group) -> list[_Step]:
    """Returns the steps that are known; what is exposed of each is the share that the table has."""
    found = []
    for each in group.settings:
        if each.step_s is not None and each.comm_s is not None and each.exposed_share is not None:
            step_s, share = each.step_s.median, each.exposed_share.median
            found.append(_Step(each, step_s, each.comm_s.median, share * step_s, share))
    return found
