"""The parts of a step: computing and waiting for gradients; and the time that overlap saves, or could save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_commopt.measure.exposed_share import StepParts
from lightning_commopt.measure.exposed_share import step_parts as split_step
from lightning_commopt.report.figures.chart import Bar, Chart, Key, Part
from lightning_commopt.report.figures.style import PlanStyle
from lightning_commopt.report.model import Group, Setting
from lightning_commopt.text.formatting import Unit, percent, time_unit

_PARTS = (
    Key("computing", "computing"),
    Key("hidden", "computing while gradients travel"),
    Key("exposed", "exposed: waiting for gradients"),
)
_MEASURED = {"step_s", "comm_s", "exposed_s"}
_MIN_SHARE = 1e-6  # of a step; less is what rounding left


class _Step(NamedTuple):
    """A setting's step in parts."""

    setting: Setting
    parts: StepParts
    comm_s: float
    share: float

    @property
    def step_s(self) -> float:
        return sum(self.parts)

    @property
    def bound_s(self) -> float:
        """The most that overlap can hide."""
        return max(self.parts.hidden_s, min(self.step_s - self.parts.exposed_s, self.comm_s))


def step_parts(group: Group) -> Chart | None:
    """Returns a stacked bar for each setting, those that wait most first; None without records of steps."""
    steps = sorted(_steps(group), key=lambda step: -step.share)
    if not steps:
        return None
    max_s = max(step.step_s for step in steps)
    unit = time_unit(max_s)
    return Chart(
        title="Exposed communication",
        note="Where the time of a step goes: the mean over steps and ranks. The settings that wait most come first.",
        x_title=f"time of a step ({unit.name})",
        bars=tuple(
            Bar(step.setting.name, f"{percent(step.share)} exposed", _parts(step, max_s, unit)) for step in steps
        ),
        keys=_PARTS,
    )


def _parts(step: _Step, max_s: float, unit: Unit) -> tuple[Part, ...]:
    parts, start_s = [], 0.0
    for key, part_s in zip(_PARTS, step.parts, strict=True):
        hover = f"{step.setting.name}: {key.text}, {unit.text(part_s)} of {unit.text(step.step_s)}"
        parts.append(Part(start_s / max_s, (start_s + part_s) / max_s, hover, key.swatch))
        start_s += part_s
    return tuple(parts)


def overlap(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns the time that overlap saves beside its bound; None without communication."""
    steps = sorted((step for step in _steps(group) if step.comm_s > 0), key=lambda step: -step.parts.hidden_s)
    if not steps:
        return None
    max_s = max(step.bound_s for step in steps)
    unit = time_unit(max_s)
    bars = []
    for step in steps:
        saved = f"{unit.text(step.parts.hidden_s)} of {unit.text(step.bound_s)}"
        hover = (
            f"{step.setting.name}: communication {unit.text(step.comm_s)}, exposed {unit.text(step.parts.exposed_s)};"
            f" saved by overlap {saved}"
        )
        parts = (
            Part(0, step.bound_s / max_s, hover, "bound"),
            Part(0, step.parts.hidden_s / max_s, hover, color=styles[step.setting.sync_method].color),
        )
        bars.append(Bar(step.setting.name, saved, parts))
    return Chart(
        title="Time saved by overlap",
        note="How much of the communication backward hides.",
        x_title=f"time saved by overlap, of a step ({unit.name})",
        bars=tuple(bars),
        keys=(Key("bound", "the most that can be saved: the computing, or the communication, whichever is shorter"),),
    )


def _steps(group: Group) -> list[_Step]:
    """Returns the steps of the settings whose communication was observed."""
    found = []
    for setting in group.settings:
        runs = [run.record.comm_time for run in setting.runs if run.record.comm_time.keys() >= _MEASURED]
        if runs and setting.exposed_share is not None and setting.comm_s is not None:
            computing_s, hidden_s, exposed_s = split_step(runs)
            hidden_s = hidden_s if hidden_s > _MIN_SHARE * computing_s else 0.0
            parts = StepParts(computing_s, hidden_s, exposed_s)
            found.append(_Step(setting, parts, setting.comm_s.median, setting.exposed_share.median))
    return found
