"""Director: decides on rank 0, from the first step to the last, which plan steps run with. Other ranks follow it.

It observes the user's plan, searches among the candidates that look promising then, watches the plan that it has
chosen, and searches again after a change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Literal, NamedTuple

from lightning_commopt.tune import limits
from lightning_commopt.tune.budget import Budget
from lightning_commopt.tune.calibration import NUM_STEPS, Shortlist
from lightning_commopt.tune.gains import Look, TimedVisit
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
        num_steps, max_regret, measuring_s: see `Budget`.
        num_settling_steps: see `Search`.

    Attributes:
        budget: what calibrations and searches may cost.
        status: the stage of its work, see `Status`.
        shortlist: the candidates that were predicted; None before the first calibration.
        visit: the steps to run next; with 0 steps nothing is left to decide.
        chosen: the plan that was chosen last; the user's, 0, before.
        is_searching: whether the present steps are part of a search.
        searches: results of the searches among the present candidates.
        events: events since the first of these searches, by step of the fit.
        aside_s: seconds that calibration has taken between steps; set by the caller.
        base_s: time of a step with the user's plan, the median of those before candidates are tried.
        lost_steps: what calibrations, searches and changes of the plan have cost, in steps with the user's plan;
            negative if candidates have saved more.
        calibration_lost_steps: the part of them that calibrations have cost.
        not_measured: names of compressors that may be chosen, and were too expensive to measure.
    """

    def __init__(
        self,
        num_steps: float,
        *,
        arm: int = 0,
        has_known: bool = False,
        max_regret: float = 0.01,
        num_settling_steps: int = 2,
        measuring_s: float = 0.0,
    ) -> None:
        self.budget = Budget(num_steps=num_steps, max_regret=max_regret, measuring_s=measuring_s)
        self._has_known = has_known
        self._num_settling_steps = num_settling_steps
        self.status: Status = "measuring"
        self.shortlist: Shortlist | None = None
        self.is_searching = False
        self.aside_s = 0.0
        self.base_s = math.nan
        self.lost_steps = self.calibration_lost_steps = 0.0
        self.not_measured: tuple[str, ...] = ()
        self._begin([1.0])
        self._direct: _Visits = self._resume(arm) if arm else self._start()
        self.visit = Visit(arm, 0)
        self.visit = next(self._direct)

    def _begin(
        self,
        expected: Sequence[float | None],
        *,
        arm: int = 0,
        lost_steps: float = 0.0,
        handicaps: Mapping[int, float] | None = None,
    ) -> None:
        """Forgets earlier candidates; ``arm`` counts as chosen. See `Search` for ``expected`` and ``handicaps``."""
        self._expected: Sequence[float | None] = expected
        self._handicaps = handicaps
        # What searching has cost, minus half of what was saved since, in steps with the user's plan.
        self._lost_steps = lost_steps
        self._base_steps = 0.0  # time trained since the last drift, in steps with the user's plan of today's length
        # The visits of each search that has chosen nothing since the last drift.
        self._undecided: list[Sequence[TimedVisit]] = []
        self._min_pause = 2 * WATCH_STEPS  # steps from one search to the next, doubled with each
        self._search_from = self.budget.num_done + self._min_pause
        self.chosen = arm
        self.searches: list[SearchResult] = []
        self.events: list[Event] = []

    def advance(self, report: Report) -> Visit:
        """Takes the report of `visit`, and returns the next one."""
        self.budget.num_done += self.visit.num_steps
        self._base_steps += self.visit.num_steps
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

    def _start(self) -> _Visits:
        yield Visit(0, limits.NUM_START_STEPS)
        known: list[float] = []
        while not known or not self.budget.allows_calibration(self.base_s):
            report = yield Visit(0, limits.NUM_FIRST_STEPS if not known else WATCH_STEPS)
            known += [s for s in report.seconds if not math.isnan(s)]
            self.base_s = statistics.median(known) if known else math.nan
            if not self.budget.allows_calibration(self.base_s) and not math.isinf(self.budget.num_steps):
                self.status = "too short"
                yield from self._end()
        lost_steps = 0.0
        if self._has_known:
            self.status = "searching"
            self._begin([1.0, None])
            yield from self._search()
            if self.chosen:
                yield from self._watch_and_search()
            lost_steps = max(0.0, self._lost_steps)
            self._begin([1.0])
        lost_steps += yield from self._calibrate(known)
        while self.shortlist is None or not self.shortlist.candidates:
            self.status = "unpredictable" if self.shortlist is None else "nothing promising"
            self._begin([1.0])
            yield from self._watch()
            self._begin([1.0])
            if not self.budget.allows_calibration(self.base_s):
                yield from self._end()
            lost_steps += yield from self._calibrate([])
        base_s = self.shortlist.base.prediction.step_s
        tried = self.shortlist.candidates
        ratios = [candidate.prediction.high_s / base_s for candidate in tried]
        expected = [1.0, *(None if math.isnan(ratio) else ratio for ratio in ratios)]
        hooks = [candidate.plan.comm_hook for candidate in (self.shortlist.base, *tried)]
        is_lossy = [hook is not None and hook.claims.is_lossy for hook in hooks]
        handicaps = {arm: limits.LOSSY_HANDICAP for arm, lossy in enumerate(is_lossy) if lossy and not is_lossy[0]}
        self.status = "searching"
        self._begin(expected, lost_steps=lost_steps, handicaps=handicaps)
        yield from self._search()
        yield from self._watch_and_search()

    def _calibrate(self, before_s: Sequence[float]) -> Generator[Visit, Report, float]:
        """Observes the user's plan; returns what that has cost, in steps.

        ``before_s`` has the times of the steps just before. The observed steps themselves cost nothing: however slow
        they are, they train with the user's plan.
        """
        self.budget.num_calibrations += 1
        self.aside_s = 0.0
        report = yield Visit(CALIBRATE, NUM_STEPS)
        known = [*before_s, *(s for s in report.seconds if not math.isnan(s))]
        self.base_s = statistics.median(known) if known else self.base_s
        lost_steps = (report.change_s + self.aside_s) / self.base_s
        self.lost_steps += lost_steps
        self.calibration_lost_steps += lost_steps
        return lost_steps

    @property
    def measuring_limit_s(self) -> float:
        """Seconds that a calibration may take to measure compressors, on every rank."""
        return self.budget.measuring_limit_s(self.base_s)

    def _end(self) -> _Visits:
        while True:
            yield Visit(0, 0)

    def _watch_and_search(self) -> _Visits:
        """Watches the plan that was chosen, and searches whenever that is due."""
        while True:
            yield from self._watch()
            yield from self._search()

    def _search(self) -> _Visits:
        """Searches once, and appends the result to `searches`."""
        self.is_searching, is_first = True, not self.searches
        known = self._base_steps + self.budget.num_left
        search = Search(
            self._expected,
            self.budget.max_regret * known * (limits.FIRST_SHARE if is_first else limits.ALL_SHARE) - self._lost_steps,
            arm=self.visit.arm,
            is_start=not self.budget.num_done,
            num_settling_steps=self._num_settling_steps,
            handicaps=self._handicaps,
            earlier=self._undecided,
            tried={arm for result in self.searches for arm in result.gains},
        )
        result = yield from search.run()
        self._undecided = [] if result.arm else [*self._undecided, *([search.visits] if search.visits else [])]
        self.searches.append(result)
        self._lose(result.lost_s, result.base_s)
        self.chosen, self.is_searching = result.arm, False
        self._min_pause *= 2
        self._search_from = self.budget.num_done + self._min_pause

    def _lose(self, lost_s: float, base_s: float) -> None:
        """Adds what a search or a change of the plan has cost, or saved, compared with steps of ``base_s``."""
        lost_steps = lost_s / base_s if base_s > 0 else 0.0
        self._lost_steps += lost_steps
        self.lost_steps += lost_steps

    def _watch(self) -> _Visits:
        """Watches the chosen plan until another search is due."""
        result, searched_at = self.searches[-1] if self.searches else None, self.budget.num_done
        is_measured = result is not None and result.arm > 0
        is_open = result is not None and (
            result.why == "not sure"
            or (result.why == "none faster" and result.has_more)
            or (result.why == "too short" and math.isinf(self.budget.num_steps))
        )
        num_steps, num_looks, num_shifted = limits.PROBATION_STEPS if is_measured else WATCH_STEPS, 0, 0
        reference: float | None = None
        while True:
            arm, before = self.chosen, self.visit.arm
            report = yield Visit(arm, num_steps)
            if arm != before:
                self._lose(report.change_s, self.base_s if result is None else result.base_s)
            if self.chosen != arm:
                self.events.append(Event(self.budget.num_done, "forbidden"))
            look, num_steps = Look.of(report.seconds), WATCH_STEPS
            if look is None:
                continue
            num_looks += 1
            if is_measured and result is not None and self.chosen:
                if num_looks <= limits.NUM_ON_PROBATION and look.step_s > result.base_s:
                    self.events.append(Event(self.budget.num_done, "rolled back"))
                    self.chosen, reference, is_open = 0, None, True
                    self._undecided = []
                    continue
                self._lost_steps -= limits.CREDIT * (1 - look.step_s / result.base_s) * len(report.seconds)
                # What such a search costs, over steps with the plan that it has chosen.
                cost_steps = result.lost_s / result.base_s + result.num_steps * result.gains[result.arm].gain
                if self.budget.num_done >= searched_at + cost_steps / limits.CHECK_SHARE:
                    self.events.append(Event(self.budget.num_done, "check"))
                    return
            # The noise may have ceased since, or the budget suffice.
            if is_open and self.budget.num_done >= self._search_from:
                return
            if reference is None:
                reference = look.step_s
            has_shifted = abs(math.log(look.step_s / reference)) > max(limits.DRIFT, limits.NUM_NOISES * look.noise)
            num_shifted = num_shifted + 1 if has_shifted else 0
            if num_shifted > 1 and self.budget.num_done >= self._search_from:
                self.events.append(Event(self.budget.num_done, "drift"))
                self._undecided = []
                if not self.chosen:  # a fit that has become slower has a larger budget
                    self._base_steps *= reference / look.step_s
                    self._lost_steps *= reference / look.step_s
                return
