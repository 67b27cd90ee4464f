"""What ``plan="auto"`` leaves in ``run.json``: the plans that it tried, and how long their steps took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TriedPlan:
    """A plan of a search.

    Attributes:
        plan: its name.
        predicted_s: of a step, and the ends of its interval; None without a prediction.
        gain: share of a step that it saves, and the ends of its interval; None if it was not timed.
    """

    plan: str
    predicted_s: Sequence[float] | None
    gain: Sequence[float] | None


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps in a row with one plan, the first of them counted from 0 in the fit.

    Attributes:
        seconds: of each step, on the slowest rank; or means over as many steps each. None where none counts.
    """

    plan: str
    first_step: int
    num_steps: int
    seconds: Sequence[float | None]

    @property
    def end_step(self) -> int:
        return self.first_step + self.num_steps

    @property
    def steps_per_number(self) -> int:
        return self.num_steps // max(1, len(self.seconds))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What the searches of a fit have found.

    Attributes:
        status: why the last one ended, or how far it is.
        base_step_s: a step with the user's plan, when it was last compared; None before.
        chosen: name of the plan at the end.
        num_search_steps: of all searches.
        lost_steps: to searching, in steps with the user's plan.
        calibration_lost_steps: the part of them that was lost before the first candidate was tried.
        candidates: the user's plan, then the others.
        not_allowed: by name of a compressor that was not allowed, the share of a step that it would save at most.
        events: step of the fit, and "drift" or "check" before another search, "rolled back" or "forbidden".
        verdict: one or more sentences.
        history: all steps up to the last decision, or to as many as are kept.
    """

    status: str
    base_step_s: float | None
    chosen: str
    num_search_steps: int
    lost_steps: float
    calibration_lost_steps: float
    candidates: Sequence[TriedPlan]
    not_allowed: Mapping[str, float]
    events: Sequence[tuple[int, str]]
    verdict: str
    history: Sequence[Stretch]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Tuning:
        """Returns what ``tuning`` in ``run.json`` holds.

        Raises:
            KeyError, TypeError: something is missing, or has another shape.
        """
        candidates = [TriedPlan(**one) for one in values["candidates"]]
        history = [Stretch(**one) for one in values["history"]]
        return cls(**{**values, "candidates": candidates, "history": history})
