"""The result of searches, in sentences and for the record of a run, with the history of its steps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from lightning_commopt.cost.predict import Candidate
from lightning_commopt.measure.runs.record import Stretch, TriedPlan, Tuning
from lightning_commopt.plan import Plan
from lightning_commopt.text.formatting import MILLISECONDS, short_percent
from lightning_commopt.tune.director import CALIBRATE, Director
from lightning_commopt.tune.limits import MAX_STEPS

_WHY = {
    "none faster": "no candidate is faster than it",
    "not sure": "no candidate is faster beyond the noise of the steps",
    "too short": "trying more would take more than 1 % of the time",
    "unmeasurable": "no step could be timed: each had a validation or batches of other shapes",
}

_NOTHING_TRIED = {
    "too short": (
        "The fit is too short to look for a better one within 1 % of its time: it has {director.budget.num_steps:.0f}"
        " steps, and needs {director.budget.needed_steps}"
    ),
    "measuring": "The fit ended before its steps were measured",
    "too soon": (
        "How many steps would follow was unknown, so a search was to begin after {director.budget.needed_steps}, and"
        " the fit ended before"
    ),
    "unpredictable": "Its steps do not show what gradient sync costs",
}

_MAX_NUMBERS = 1000
"""Maximum number of step times in a record, some ten kilobytes. In a long fit they cover the searches that chose its
plan, but not the watch that follows."""

_LEFT = {
    "rolled back": "a faster plan did not stay faster",
    "forbidden": "the averages of a faster plan were too far off",
}

_HIDDEN = ": backward hides gradient sync as far as any could"


def text_to_log(director: Director, plans: Sequence[Plan]) -> str:
    """Returns the text to log during the fit: that a search begins, and later `verdict`; empty before."""
    if director.is_searching:
        others = "; ".join(plan.name for plan in plans[1:])
        why = "The step time has changed. " if director.events and director.events[-1].what == "drift" else ""
        steps = f"A search begins, of at most {MAX_STEPS} steps."
        return f"{why}{steps} Your plan is {plans[0].name}; candidates are {others}."
    if director.status == "measuring" or director.visit.arm == CALIBRATE:
        return ""
    return verdict(director, plans)


def verdict(director: Director, plans: Sequence[Plan]) -> str:
    """Returns one or more sentences: what was chosen, predicted and measured, and what else would help."""
    sentences = [_choice(director, plans)]
    if untried := _untried(director, plans):
        sentences.append(f"Candidates that were not tried: {'; '.join(untried)}.")
    if director.shortlist is not None and director.shortlist.not_allowed and not director.has_drifted:
        name, share = max(director.shortlist.not_allowed.items(), key=lambda item: item[1])
        sentences.append(
            f"{name}, lossy, would save up to {short_percent(share)} of a step: lossy=[{name!r}], or commopt tune"
            f" --lossy {name}, allows it."
        )
    if director.not_measured:
        sentences.append(
            f"Not tried: {', '.join(director.not_measured)}, because measuring a compressor would take longer than this"
            " fit may spend on it."
        )
    return " ".join(sentences)


def summary(director: Director, plans: Sequence[Plan], history: Sequence[Stretch]) -> dict[str, Any]:
    """Returns a `Tuning` in types that JSON has, for ``run.json``."""
    searches, shortlist = director.searches, director.shortlist
    predicted = [] if shortlist is None else [*map(_interval, (shortlist.base, *shortlist.candidates))]
    gains = searches[-1].gains if searches else {}
    tuning = Tuning(
        status=director.status if not searches else searches[-1].why,
        base_step_s=_finite(searches[-1].base_s if searches else director.base_s),
        chosen=plans[director.chosen].name,
        num_search_steps=director.num_search_steps,
        lost_steps=director.lost_steps,
        calibration_lost_steps=director.calibration_lost_steps,
        candidates=[
            TriedPlan(
                plan=plan.name,
                predicted_s=predicted[arm] if arm < len(predicted) and not math.isnan(predicted[arm][0]) else None,
                gain=gains.get(arm),
            )
            for arm, plan in enumerate(plans)
        ],
        not_allowed={} if shortlist is None else dict(shortlist.not_allowed),
        events=[*director.events],
        verdict=verdict(director, plans),
        history=history,
    )
    return dataclasses.asdict(tuning)


def _choice(director: Director, plans: Sequence[Plan]) -> str:
    own = f"The plan stays: {plans[0].name}"
    status, budget = str(director.status), director.budget
    if status == "measuring" and math.isinf(budget.num_steps) and 0 < budget.num_done < budget.needed_steps:
        status = "too soon"
    if status in _NOTHING_TRIED:
        return f"{own}. {_NOTHING_TRIED[status].format(director=director)}."
    if director.status == "nothing promising":
        helps = director.shortlist is not None and bool(director.shortlist.not_allowed)
        return f"{own}. No {'allowed plan' if helps else 'plan'} is predicted to be faster{'' if helps else _HIDDEN}."
    if not director.searches:
        if director.status == "resumed":
            return f"The plan that was chosen before stays: {plans[director.chosen].name}."
        return f"{own}. The fit ended within the search."
    result, arm = director.searches[-1], director.chosen
    if not arm:
        reasons = [_LEFT[event.what] for event in director.events if event.what in _LEFT]
        reason = reasons[-1] if result.arm and reasons else _WHY.get(result.why, result.why)
        return f"{own}, after {result.num_steps} steps of search: {reason}."
    measured = [one for one in director.searches if arm in one.gains]
    if not measured:
        return f"The plan that was chosen before stays: {plans[arm].name}."
    result = measured[-1]
    gain, base_s = result.gains[arm], result.base_s
    after = f"{MILLISECONDS.text(base_s * (1 - gain.gain))} per step instead of {MILLISECONDS.text(base_s)}"
    between = f"{short_percent(gain.gain)} less, {short_percent(gain.low)} to {short_percent(gain.high)}"
    predicted = _predicted(director, arm)
    measurement = f"{after} ({between}){predicted and f'; predicted were {predicted}'}"
    return f"Chosen after {result.num_steps} steps of search: {plans[arm].name}, {measurement}."


def _untried(director: Director, plans: Sequence[Plan]) -> list[str]:
    """Returns the candidates that a search has not tried because it ended early, each with its prediction."""
    if director.chosen or not director.searches or director.searches[-1].why == "none faster":
        return []
    tried = {arm for result in director.searches for arm in result.gains}
    texts = {arm: _predicted(director, arm) for arm in range(1, len(plans)) if arm not in tried}
    return [f"{plans[arm].name}{text and f', predicted to take {text}'}" for arm, text in texts.items()]


def _predicted(director: Director, arm: int) -> str:
    if director.shortlist is None or arm > len(director.shortlist.candidates) or director.has_drifted:
        return ""
    interval = _interval(director.shortlist.candidates[arm - 1])
    if math.isnan(interval[0]):
        return ""
    step, low, high = map(MILLISECONDS.text, interval)
    return f"{step} ({low} to {high})"


def _interval(candidate: Candidate[Any]) -> tuple[float, float, float]:
    return candidate.prediction.step_s, candidate.prediction.low_s, candidate.prediction.high_s


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class History:
    """Collects the visits of a fit, on rank 0, in `stretches`."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._num_steps = self._num_numbers = 0

    def add(self, plan: str, seconds: Sequence[float], *, is_timed: bool) -> None:
        """Adds a visit, with NaN where a step does not count.

        Without ``is_timed`` only the mean is kept, because the host's clock may be ahead of a device by any number of
        steps.
        """
        first_step, num_steps = self._num_steps, len(seconds)
        self._num_steps += num_steps
        known = [s for s in seconds if not math.isnan(s)]
        times_s = seconds if is_timed else [statistics.fmean(known) if known else math.nan]
        self._num_numbers += len(times_s)
        if self._num_numbers > _MAX_NUMBERS:
            return
        numbers = [None if math.isnan(s) else float(f"{s:.6g}") for s in times_s]
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.plan == plan and last.steps_per_number * len(times_s) == num_steps:
            self.stretches.pop()
            first_step, num_steps = last.first_step, last.num_steps + num_steps
            numbers = [*last.seconds, *numbers]
        self.stretches.append(Stretch(plan=plan, first_step=first_step, num_steps=num_steps, seconds=numbers))
