"""Director: decides on rank 0, from the first step to the last, which plan steps run with. Other ranks follow it.

It observes the user's plan, searches among the candidates that look promising then, and watches the plan that it has
chosen. After a change it observes the user's plan again, if the budget allows that, and searches again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Literal, NamedTuple

from lightning_commopt.tune import limits
from lightning_commopt.tune.budget import Budget
from lightning_commopt.tune.calibration import NUM_STEPS, Shortlist
from lightning_commopt.tune.gains import Drift, Look, TimedVisit
from lightning_commopt.tune.search import Report, Search, SearchResult, Visit

CALIBRATE = -1
"""Arm of a visit in which steps with the user's plan are observed."""

WATCH_STEPS = 100
"""Number of steps between two looks at the step time. Each look is a message of a kilobyte between all ranks; with
fewer looks a change would be noticed later."""

Status = Literal["measuring", "too short", "unpredictable", "nothing promising", "searching", "resumed"]
_Visits = Generator[Visit, Report, None]


class Event(NamedTuple):
    """An event in a fit: "drift" or "check" before another search, or "rolled back" or "forbidden"."""

    step: int
    what: str


class Director:
    """Decides which steps run next, on rank 0.

    Args:
        arm: the plan to begin with. 1 is a plan from a checkpoint, which is only watched.
        has_known: whether plan 1 was chosen by an earlier fit, and is tried before any prediction.
        is_predictable: whether another calibration would find other candidates.
        num_steps, max_regret, measuring_s: see `Budget`.
        num_settling_steps: see `Search`.

    Attributes:
        budget: what calibrations and searches may cost.
        status: the stage of its work, see `Status`.
        shortlist: the candidates of the last calibration; None before the first one. The caller sets it before the
            report of a calibration; if a plan is chosen at that time, it is the first candidate.
        has_drifted: whether the step time has changed since the last prediction.
        visit: the steps to run next; with 0 steps nothing is left to decide.
        chosen: the plan that was chosen last; the user's, 0, before.
        is_searching: whether the present steps are part of a search.
        searches: results of the searches among the present candidates.
        events: events of the fit, by step.
        aside_s: seconds that calibration has taken between steps; set by the caller.
        base_s: time of a step with the user's plan, the median of those before candidates are tried.
        lost_steps: what calibrations, searches and changes of the plan have cost, in steps with the user's plan;
            negative if candidates have saved more.
        calibration_lost_steps: the part of them that calibrations have cost.
        num_search_steps: number of steps in all searches.
        not_measured: names of compressors that may be chosen, and were too expensive to measure.
    """

    def __init__(
        self,
        num_steps: float,
        *,
        arm: int = 0,
        has_known: bool = False,
        is_predictable: bool = True,
        max_regret: float = 0.01,
        num_settling_steps: int = 2,
        measuring_s: float = 0.0,
    ) -> None:
        self.budget = Budget(num_steps=num_steps, max_regret=max_regret, measuring_s=measuring_s)
        self._has_known = has_known
        self._is_predictable = is_predictable
        self._num_settling_steps = num_settling_steps
        self.status: Status = "measuring"
        self.shortlist: Shortlist | None = None
        self.is_searching = self.has_drifted = False
        self.aside_s = 0.0
        self.base_s = math.nan
        self.lost_steps = self.calibration_lost_steps = 0.0
        self.num_search_steps = 0
        self.not_measured: tuple[str, ...] = ()
        self.events: list[Event] = []
        # Steps from one search to the next, and from one drift to the next, doubled if the search was in vain.
        self._min_pause = self._drift_pause = 2 * WATCH_STEPS
        self._drift_from = 0
        self._begin([1.0])
        self._direct: _Visits = self._resume(arm) if arm else self._start()
        self.visit = Visit(arm, 0)
        self.visit = next(self._direct)

    def _begin(
        self, expected: Sequence[float | None], *, arm: int = 0, handicaps: Mapping[int, float] | None = None
    ) -> None:
        """Forgets earlier candidates; ``arm`` counts as chosen. See `Search` for ``expected`` and ``handicaps``."""
        self._expected: Sequence[float | None] = expected
        self._handicaps = handicaps
        # The visits of each search that has chosen nothing since the last drift.
        self._undecided: list[Sequence[TimedVisit]] = []
        self._search_from = self.budget.num_done + self._min_pause
        self.chosen = arm
        self.searches: list[SearchResult] = []

    def advance(self, report: Report) -> Visit:
        """Takes the report of `visit`, and returns the next one."""
        self.budget.num_done += self.visit.num_steps
        self.budget.base_steps += self.visit.num_steps
        self.visit = self._direct.send(report)
        return self.visit

    def forbid(self, arms: Sequence[int]) -> None:
        """Rules plans out. If one is in use, training returns to the user's plan after the present visit."""
        self._expected = [math.inf if arm in arms else expected for arm, expected in enumerate(self._expected)]
        self.chosen = 0 if self.chosen in arms else self.chosen

    @property
    def is_timed(self) -> bool:
        """Whether the steps of `visit` are timed on the device's clock, which is read when they end."""
        return self.visit.num_steps < WATCH_STEPS

    def _resume(self, arm: int) -> _Visits:
        self.status = "resumed"
        self._begin([None, None], arm=arm)
        yield from self._watch_and_search()
        yield from self._predict_and_search([])

    def _start(self) -> _Visits:
        yield Visit(0, limits.NUM_START_STEPS)
        known: list[float] = []
        while not known or not self.budget.allows_calibration(self.base_s):
            report = yield Visit(0, limits.NUM_FIRST_STEPS if not known else WATCH_STEPS)
            known += [s for s in report.seconds if not math.isnan(s)]
            self.base_s = statistics.median(known) if known else math.nan
            if not self.budget.allows_calibration(self.base_s) and not math.isinf(self.budget.num_steps):
                self.status = "too short"
                yield from self._wait()
        if self._has_known:
            self.status = "searching"
            self._begin([1.0, None])
            yield from self._search()
            if self.chosen:
                yield from self._watch_and_search()
        yield from self._predict_and_search(known if not self.events else [])

    def _predict_and_search(self, before_s: Sequence[float]) -> _Visits:
        """Calibrates, and searches among the candidates of that; again after each change that the budget can pay for.

        ``before_s`` has the times of the steps just before, with the user's plan.
        """
        while True:
            yield from self._calibrate(before_s)
            before_s = []
            shortlist = self.shortlist
            if shortlist is not None and shortlist.candidates:
                self.status = "searching"
                self._begin(shortlist.expected, arm=1 if self.chosen else 0, handicaps=shortlist.handicaps)
                yield from self._search()
                yield from self._watch_and_search()
                continue
            self.status = "unpredictable" if shortlist is None else "nothing promising"
            self._begin([1.0])
            yield from self._watch()
            self._min_pause *= 2
            yield from self._wait()

    def _calibrate(self, before_s: Sequence[float]) -> _Visits:
        """Observes the user's plan.

        ``before_s`` has the times of the steps just before. The observed steps themselves cost nothing: however slow
        they are, they train with the user's plan.
        """
        self.aside_s = 0.0
        report = yield Visit(CALIBRATE, NUM_STEPS)
        known = [*before_s, *(s for s in report.seconds if not math.isnan(s))]
        self.base_s = statistics.median(known) if known else self.base_s
        self.has_drifted &= self.shortlist is None or math.isnan(self.shortlist.base.prediction.step_s)
        lost_s = report.change_s + self.aside_s
        self.budget.measured_s += self.aside_s
        self.calibration_lost_steps += self._lose(lost_s, self.base_s)

    @property
    def measuring_limit_s(self) -> float:
        """Seconds that a calibration may take to measure compressors, on every rank."""
        return self.budget.measuring_limit_s(self.base_s)

    def _wait(self) -> _Visits:
        """Waits until the budget allows a calibration. It grows in a fit of unknown length; 0 steps end another one."""
        while not self.budget.allows_calibration(self.base_s):
            yield Visit(0, WATCH_STEPS if math.isinf(self.budget.num_steps) else 0)

    def _watch_and_search(self) -> _Visits:
        """Watches the plan that was chosen, and searches whenever that is due, until it is time to calibrate again."""
        while True:
            yield from self._watch()
            if self.shortlist is None:
                is_due = self.has_drifted or not self.chosen
            else:
                is_due = self.has_drifted and self._is_predictable
            if is_due and self.budget.allows_calibration(self.base_s):
                return
            yield from self._search()

    def _search(self) -> _Visits:
        """Searches once, and appends the result to `searches`."""
        self.is_searching, is_first = True, not self.searches
        search = Search(
            self._expected,
            self.budget.search_steps(is_first=is_first),
            arm=self.visit.arm,
            chosen=self.chosen,
            num_settling_steps=self._num_settling_steps,
            handicaps=self._handicaps,
            earlier=self._undecided,
            tried={arm for result in self.searches for arm in result.gains},
        )
        result = yield from search.run()
        self._undecided = [] if result.arm else [*self._undecided, *([search.visits] if search.visits else [])]
        self.searches.append(result)
        self.num_search_steps += result.num_steps
        self._lose(result.lost_s, result.base_s)
        self.chosen, self.is_searching = result.arm, False
        self._min_pause *= 1 if result.arm else 2
        self._drift_pause = 2 * WATCH_STEPS if result.arm else self._drift_pause
        self._search_from = self.budget.num_done + self._min_pause

    def _lose(self, lost_s: float, base_s: float) -> float:
        """Adds what a search or a change of the plan has cost, or saved, in steps of ``base_s``, and returns it."""
        lost_steps = lost_s / base_s if base_s > 0 else 0.0
        self.budget.lost_steps += lost_steps
        self.lost_steps += lost_steps
        return lost_steps

    def _watch(self) -> _Visits:
        """Watches the chosen plan until another search is due."""
        result, searched_at = self.searches[-1] if self.searches else None, self.budget.num_done
        is_measured = result is not None and result.arm in result.gains
        if result is None:
            is_open = self.status == "unpredictable"
        else:
            is_open = result.why == "not sure" or (result.why == "none faster" and result.has_more)
            is_open |= result.why == "too short" and math.isinf(self.budget.num_steps)
        num_steps, num_looks = limits.PROBATION_STEPS if is_measured else WATCH_STEPS, 0
        drift = Drift()
        while True:
            arm, before = self.chosen, self.visit.arm
            report = yield Visit(arm, num_steps)
            if arm != before:
                self._lose(report.change_s, self.base_s if result is None else result.base_s)
            look, num_steps = Look.of(report.seconds), WATCH_STEPS
            if self.chosen != arm:
                self.events.append(Event(self.budget.num_done, "forbidden"))
                is_open = self.shortlist is None or any(expected != math.inf for expected in self._expected[1:])
                drift = Drift()
                continue
            if look is None:
                continue
            num_looks += 1
            if not arm and math.isnan(self.base_s):  # the plan of a checkpoint was in use before
                self.base_s = look.step_s
            drift.add(look)
            if drift.num_shifted > 1 and self.budget.num_done >= self._drift_from:
                self._note_drift(drift)
                return
            if is_measured and result is not None and self.chosen:
                if num_looks <= limits.NUM_ON_PROBATION and look.step_s > result.base_s:
                    self.events.append(Event(self.budget.num_done, "rolled back"))
                    self.chosen, drift, is_open = 0, Drift(), True
                    continue
                if drift.num_shifted:  # nobody knows what a step with the user's plan takes now
                    continue
                self._credit(result, look, len(report.seconds))
                if self.budget.num_done >= searched_at + result.cost_steps / limits.CHECK_SHARE:
                    self.events.append(Event(self.budget.num_done, "check"))
                    return
            # The noise may have ceased since, or the budget suffice.
            if is_open and self.budget.num_done >= self._search_from:
                return

    def _credit(self, result: SearchResult, look: Look, num_steps: int) -> None:
        """Adds to the budget what the plan that a search has chosen saved in some steps."""
        saved = min(result.gains[result.arm].gain, 1 - look.step_s / result.base_s)
        self.budget.lost_steps -= limits.CREDIT * saved * num_steps

    def _note_drift(self, drift: Drift) -> None:
        self.events.append(Event(self.budget.num_done, "drift"))
        self._undecided, self.has_drifted = [], True
        self._drift_pause *= 2
        self._drift_from = self.budget.num_done + self._drift_pause
        if not self.chosen:  # a fit that has become slower has a larger budget
            self.budget.rescale(drift.reference_s / drift.step_s)
        if not self.chosen or math.isnan(self.base_s):
            self.base_s = drift.step_s
