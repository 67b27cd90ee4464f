"""Controller: searches at the start of a fit, then watches the plan that it chose, and searches again after a change.

Knows no torch and no Lightning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.tune.gains import TimedVisit
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
    """Decides which steps run next; `run` yields visits, and receives their reports.

    Args:
        expected: see `Search`; not empty.
        num_steps: that the fit will take; infinite if unknown: then searches are paid for by what was trained so far.
        settings: see there.
        arm: the plan at present.
        lost_steps: what was lost before, in steps.
        is_start: the fit has just begun, so that its first steps do not count.
        handicaps: see `Search`.

    Attributes:
        chosen: the plan that was chosen last; the one at the beginning before that.
        is_searching: the present steps are part of a search.
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
        handicaps: Mapping[int, float] | None = None,
    ) -> None:
        self._expected = expected
        self._num_steps = num_steps
        self._settings = settings or ControllerSettings()
        self._num_done = 0
        self._base_steps = 0.0  # as many of the present length took as long as what was trained so far
        self._is_start = is_start
        self._handicaps = handicaps
        self._undecided: list[Sequence[TimedVisit]] = []  # visits of searches that were not sure, since the last drift
        self._min_pause = 2 * WATCH_STEPS  # from one search to the next
        self._search_from = self._min_pause
        self.chosen = arm
        self.lost_steps = lost_steps
        self.is_searching = False
        self.searches: list[Found] = []
        self.events: list[Event] = []

    def forbid(self, arms: Sequence[int]) -> None:
        """Leaves plans for good when the present visit ends; the user's takes the place of one that was chosen."""
        self._expected = [math.inf if arm in arms else expected for arm, expected in enumerate(self._expected)]
        self.chosen = 0 if self.chosen in arms else self.chosen

    def run(self, *, searches: bool = True) -> Generator[Visit, Report, None]:
        """Searches now, if wanted, and whenever it is due."""
        if searches:
            yield from self.search()
        while True:
            yield from self.watch()
            yield from self.search()

    def search(self) -> Generator[Visit, Report, None]:
        """Searches once; the result is the last of `searches`."""
        self.is_searching, is_first = True, not self.searches
        known = self._base_steps + (0 if math.isinf(self._num_steps) else self._num_steps - self._num_done)
        budget = self._settings.max_regret * known * (_FIRST_SHARE if is_first else _ALL_SHARE) - self.lost_steps
        search = Search(
            self._expected,
            budget,
            self._settings.search,
            arm=self.chosen,
            is_start=is_first and self._is_start,
            handicaps=self._handicaps,
            earlier=self._undecided,
        )
        found = yield from search.run()
        self._undecided = [*self._undecided, search.visits] if found.why in ("not sure", "too short") else []
        self._count(found.num_steps)
        self.searches.append(found)
        self.lost_steps += found.lost_s / found.base_s if found.base_s > 0 else 0.0
        self.chosen, self.is_searching = found.arm, False
        self._min_pause *= 2
        self._search_from = self._num_done + self._min_pause

    def watch(self) -> Generator[Visit, Report, None]:
        """Returns when another search is due."""
        found, searched_at = self.searches[-1] if self.searches else None, self._num_done
        is_measured = found is not None and found.arm > 0
        is_open = found is not None and (
            found.why == "not sure" or (found.why == "too short" and math.isinf(self._num_steps))
        )
        num_steps, num_looks, num_shifted = _PROBATION_STEPS if is_measured else WATCH_STEPS, 0, 0
        reference: float | None = None
        while True:
            arm = self.chosen
            report = yield Visit(arm, num_steps)
            self._count(num_steps)
            if self.chosen != arm:
                self.events.append(Event(self._num_done, "forbidden"))
            look, num_steps = _Look.of(report.seconds), WATCH_STEPS
            if look is None:
                continue
            num_looks += 1
            if is_measured and found is not None and self.chosen:
                if num_looks <= _NUM_ON_PROBATION and look.step_s > found.base_s:
                    self.events.append(Event(self._num_done, "rolled back"))
                    self.chosen, reference, is_open = 0, None, True
                    continue
                self.lost_steps -= _CREDIT * (1 - look.step_s / found.base_s) * len(report.seconds)
                # What such a search costs, over steps with the plan that it has chosen.
                cost_steps = found.lost_s / found.base_s + found.num_steps * found.gains[found.arm].gain
                if self._num_done >= searched_at + cost_steps / _CHECK_SHARE:
                    self.events.append(Event(self._num_done, "check"))
                    return
            if is_open and self._num_done >= self._search_from:  # the noise may have ceased, or the budget suffice
                return
            if reference is None:
                reference = look.step_s
            has_shifted = abs(math.log(look.step_s / reference)) > max(_DRIFT, _NUM_NOISES * look.noise)
            num_shifted = num_shifted + 1 if has_shifted else 0
            if num_shifted > 1 and self._num_done >= self._search_from:
                self.events.append(Event(self._num_done, "drift"))
                self._undecided = []
                if not self.chosen:  # a fit that has become slower has a larger budget
                    self._base_steps *= reference / look.step_s
                    self.lost_steps *= reference / look.step_s
                return

    def _count(self, num_steps: int) -> None:
        self._num_done += num_steps
        self._base_steps += num_steps


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
