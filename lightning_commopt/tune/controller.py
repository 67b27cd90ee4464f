"""Controller: searches at the start of a fit, then watches the plan that it chose, and searches again after a change.

Knows no torch and no Lightning: it answers the times of some steps with which steps to run next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.tune.search import Found, Report, Search, SearchSettings, Visit

WATCH_STEPS = 100
"""Steps between two looks at the step time."""

_PROBATION_STEPS = 20  # with the plan that was chosen, before the first look at it
_NUM_ON_PROBATION = 3  # looks at which a plan that is no faster than the user's is rolled back
_DRIFT = 0.15  # change of the step time, beyond its noise, after which another plan may be the fastest
_NUM_NOISES = 5.0
_FIRST_SHARE, _ALL_SHARE = 0.6, 0.8  # of the budget, for the first search and for all: the rest is for bad luck
_CREDIT = 0.5  # of what a plan has saved, for further searches
_CHECK_SHARE = 0.005  # of the time, for looking whether the plan is still the best
_NUM_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """What a user may lose at most.

    Attributes:
        max_regret: share of the fit's time, over all its steps, that searching may cost.
        search: of one search.
    """

    max_regret: float = 0.01
    search: SearchSettings = field(default_factory=SearchSettings)


class Event(NamedTuple):
    """Something that the controller has noticed: "drift" or "check" before another search, or "rolled back"."""

    step: int
    what: str


class Controller:
    """Decides which steps run next: `advance` gets the report of the last ones.

    Args:
        expected: see `Search`; not empty.
        num_steps: that the fit will take; infinite if unknown: then searches are paid for by what was trained so far.
        settings: see there.
        arm: the plan at present.
        lost_steps: what was lost before, in steps.
        is_start: the fit has just begun, so that its first steps do not count.
        skips_search: begin by watching that plan, which an earlier run has found.
        handicaps: see `Search`.

    Attributes:
        visit: the steps to run next.
        is_searching: they are part of a search.
        searches: what was found so far.
        lost_steps: what searching has cost, less half of what was saved since, in steps with the user's plan.
        events: since the fit began.
    """

    def __init__(
        self,
        expected: Sequence[float | None],
        num_steps: float,
        settings: ControllerSettings | None = None,
        *,
        arm: int = 0,
        lost_steps: float = 0.0,
        is_start: bool = True,
        skips_search: bool = False,
        handicaps: Mapping[int, float] | None = None,
    ) -> None:
        self._expected = expected
        self._num_steps = num_steps
        self._settings = settings or ControllerSettings()
        self._arm = arm
        self._num_done = 0
        self._base_steps = 0.0  # as many of the present length took as long as what was trained so far
        self.lost_steps = lost_steps
        self._is_start = is_start
        self._handicaps = handicaps
        self._searched_at = 0
        self.searches: list[Found] = []
        self.events: list[Event] = []
        self.is_searching = not skips_search
        self._visits = self._run()
        self.visit = next(self._visits)

    def advance(self, report: Report) -> Visit:
        """Takes the report of `visit`, and returns the next one."""
        self._num_done += self.visit.num_steps
        self._base_steps += self.visit.num_steps
        self.visit = self._visits.send(report)
        return self.visit

    def forbid(self, arms: Sequence[int]) -> None:
        """Leaves plans for good, when `visit` has ended; the user's plan takes the place of one that was chosen."""
        self._expected = [math.inf if arm in arms else expected for arm, expected in enumerate(self._expected)]
        if self._arm in arms:
            self.events.append(Event(self._num_done + self.visit.num_steps, "forbidden"))
            self._arm = 0

    @property
    def chosen(self) -> int:
        """The plan that was chosen last; the one at the beginning before that."""
        return self._arm

    def _run(self) -> Generator[Visit, Report, None]:
        min_pause = 2 * WATCH_STEPS
        while True:
            if self.is_searching:
                yield from self._search()
                self._searched_at, min_pause = self._num_done, 2 * min_pause
            self.is_searching = False
            yield from self._watch(self._searched_at + min_pause)
            self.is_searching = True

    def _search(self) -> Generator[Visit, Report, None]:
        is_first = not self.searches
        known = self._base_steps + (0 if math.isinf(self._num_steps) else self._num_steps - self._num_done)
        budget = self._settings.max_regret * known * (_FIRST_SHARE if is_first else _ALL_SHARE) - self.lost_steps
        search = Search(
            self._expected,
            budget,
            self._settings.search,
            arm=self._arm,
            is_start=is_first and self._is_start,
            handicaps=self._handicaps,
        )
        found = yield from search.run()
        self.searches.append(found)
        self.lost_steps += found.lost_s / found.base_s if found.base_s > 0 else 0.0
        self._arm = found.arm

    def _watch(self, not_before: int) -> Generator[Visit, Report, None]:
        """Returns when another search is due, not before a number of steps."""
        found = self.searches[-1] if self.searches else None
        is_measured = found is not None and found.arm > 0
        is_open = found is not None and (
            found.why == "not sure" or (found.why == "too short" and math.isinf(self._num_steps))
        )
        num_steps, num_looks, num_odd = _PROBATION_STEPS if is_measured else WATCH_STEPS, 0, 0
        reference: float | None = None
        while True:
            report = yield Visit(self._arm, num_steps)
            look, num_steps = _Look.of(report.seconds), WATCH_STEPS
            if look is None:
                continue
            num_looks += 1
            if is_measured and found is not None and self._arm:
                if num_looks <= _NUM_ON_PROBATION and look.step_s > found.base_s:
                    self.events.append(Event(self._num_done, "rolled back"))
                    self._arm, reference, is_open = 0, None, True
                    continue
                self.lost_steps -= _CREDIT * (1 - look.step_s / found.base_s) * len(report.seconds)
                if self._num_done >= self._searched_at + _cost_steps(found) / _CHECK_SHARE:
                    self.events.append(Event(self._num_done, "check"))
                    return
            if is_open and self._num_done >= not_before:  # the noise may have ceased, or the budget suffice
                return
            if reference is None:
                reference = look.step_s
            has_shifted = abs(math.log(look.step_s / reference)) > max(_DRIFT, _NUM_NOISES * look.noise)
            num_odd = num_odd + 1 if has_shifted else 0
            if num_odd > 1 and self._num_done >= not_before:
                self.events.append(Event(self._num_done, "drift"))
                if not self._arm:  # a fit that has become slower has a larger budget
                    self._base_steps *= reference / look.step_s
                    self.lost_steps *= reference / look.step_s
                return


def _cost_steps(found: Found) -> float:
    """Returns what a search like this one costs, over steps with the plan that it has chosen."""
    return found.lost_s / found.base_s + found.num_steps * found.gains[found.arm].gain


class _Look(NamedTuple):
    """The time of a step over many, and its noise: of means over blocks, as a host's clock sees a device's steps."""

    step_s: float
    noise: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> _Look | None:
        known = [s for s in seconds if not math.isnan(s)]
        size = len(known) // _NUM_BLOCKS
        if not size:
            return None
        means = [math.log(statistics.fmean(known[i * size : (i + 1) * size])) for i in range(_NUM_BLOCKS)]
        center = statistics.median(means)
        noise = 1.4826 * statistics.median([abs(mean - center) for mean in means]) / math.sqrt(_NUM_BLOCKS)
        return cls(math.exp(center), noise)
