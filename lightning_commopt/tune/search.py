"""Search: decides which plan the next steps run with, from the times of earlier steps. It uses no torch or Lightning.

The user's plan (arm 0) and the candidates alternate. A candidate is dropped as soon as it cannot win; a candidate wins
if it is faster beyond the noise. The steps lost to slower plans and to changes of plan stay within a budget.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.tune import limits
from lightning_commopt.tune.gains import Gain, TimedVisit, gains, typical_s


class Visit(NamedTuple):
    """Consecutive steps to run with a plan."""

    arm: int
    num_steps: int


class Report(NamedTuple):
    """The times of a visit.

    Attributes:
        seconds: time of each step, the slowest rank's; NaN where a step does not count.
        change_s: time to change the plan, from the end of the step before to the start of the first one.
    """

    seconds: tuple[float, ...]
    change_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        arm: the plan to train with.
        gains: the gain of each candidate that was timed, by arm.
        base_s: time of a step with the user's plan; NaN if none counted.
        num_steps: steps that the search took.
        lost_s: time that the search took minus the time of the same number of steps with the user's plan; negative if
            it saved time.
        why: "faster", "none faster", "not sure", "too short" (the run, for its cost) or "unmeasurable".
        has_more: whether there are candidates that no search has tried.
    """

    arm: int
    gains: dict[int, Gain] = field(default_factory=dict)
    base_s: float = math.nan
    num_steps: int = 0
    lost_s: float = 0.0
    why: str = "none faster"
    has_more: bool = False

    @property
    def cost_steps(self) -> float:
        """What such a search costs over steps with the plan that it has chosen, in steps with the user's plan."""
        return self.lost_s / self.base_s + self.num_steps * self.gains[self.arm].gain


Searching = Generator[Visit, Report, SearchResult]


class Search:
    """One search; `run` is a generator that yields visits, receives their reports, and returns the result.

    Args:
        expected: for each plan, the most promising first, the longest predicted step time over the user's: 1 for arm 0,
            None if it is unknown, infinity for a plan that must not be tried.
        budget_steps: maximum cost of the search, in steps with the user's plan.
        arm: the plan that steps run with at present.
        chosen: the plan that was chosen before, 0 if none was. It stays unless it is found to save less than 2 % of a
            step.
        num_settling_steps: number of steps after a change of plan that are not timed: DDP rebuilds its buckets after
            the first of them.
        handicaps: extra saving that is required of a plan, as a share of a step, by arm.
        earlier: visits of earlier searches that still count.
        tried: arms that were timed by searches whose visits no longer count. Without ``earlier``, others come first.

    Attributes:
        visits: the visits of this search so far.
    """

    def __init__(
        self,
        expected: Sequence[float | None],
        budget_steps: float,
        *,
        arm: int,
        chosen: int,
        num_settling_steps: int,
        handicaps: Mapping[int, float] | None = None,
        earlier: Sequence[Sequence[TimedVisit]] = (),
        tried: Collection[int] = (),
    ) -> None:
        self._expected = expected
        candidates = (arm for arm in range(1, len(expected)) if expected[arm] != math.inf)
        self._candidates = sorted(candidates, key=lambda number: (number != chosen, not earlier and number in tried))
        self._budget_steps = budget_steps
        self._num_settling_steps = num_settling_steps
        self._arm, self._chosen = arm, chosen
        self._handicaps = handicaps or {}
        self.visits: list[TimedVisit] = []
        self._all_visits = [*earlier, self.visits]
        self._num_steps = 0
        self._num_steps_of: Counter[int] = Counter()  # number of steps with each plan
        self._change_s: list[float] = []
        self._settling: list[tuple[int, float]] = []  # plan and seconds of the first step after each change
        self._is_too_dear = False

    def run(self) -> Searching:
        if not (yield from self._visit(0)):
            return SearchResult(arm=self._chosen, num_steps=self._num_steps, why="unmeasurable")
        open_arms = self._promising(self._candidates)
        active = open_arms[: self._num_affordable()]
        if open_arms and not active:
            return self._result([], "too short")
        while active:
            for arm in self._in_order(active):
                if arm not in active:
                    continue
                if not self._can_afford(arm):
                    return self._result(active)
                yield from self._visit(arm)
                active = self._promising(active)
            if active:
                if not self._can_afford(0):
                    return self._result(active)
                yield from self._visit(0)
                active = self._promising(active)
                if self._is_decided(active):
                    break
        return self._result(active)

    def _num_affordable(self) -> int:
        """Returns the number of candidates for which the budget probably suffices."""
        num_changes = int(self._budget_steps / max(self._change_steps, 1e-9))
        # Each of n candidates is visited twice, and so is the user's plan after them; each visit begins with a change.
        return max(0, min(limits.MAX_ARMS, (num_changes - 3) // 2))

    def _in_order(self, active: Sequence[int]) -> list[int]:
        """Returns candidates in their order; once all were visited, the fastest first, in case steps are too few."""
        net = self._net(gains(self._all_visits))
        return sorted(active, key=lambda arm: -net[arm].gain) if net.keys() >= {*active} else [*active]

    def _visit(self, arm: int) -> Generator[Visit, Report, bool]:
        """Times a plan; returns whether any of its steps counted. A plan that is far slower is given up at once."""
        if arm != self._arm:
            first = yield from self._steps(arm, 1)
            self._settling += [(arm, seconds) for seconds in first]
            others = yield from self._steps(arm, self._num_settling_steps - 1)
            if arm and others and min(others) > limits.MAX_SLOWDOWN * self._base_s:
                others += yield from self._steps(arm, 1)  # a single step may be slow by chance
                if min(others) > limits.MAX_SLOWDOWN * self._base_s:
                    self.visits.append(TimedVisit(arm, self._num_steps, tuple(others)))
                    return True
        seconds = list[float]()
        for _ in range(limits.NUM_TRIES):
            seconds += yield from self._steps(arm, limits.NUM_TIMED_STEPS)
            if len(seconds) > limits.NUM_TIMED_STEPS // 2:
                break
        if seconds:
            self.visits.append(TimedVisit(arm, self._num_steps, tuple(seconds)))
        return bool(seconds)

    def _steps(self, arm: int, num_steps: int) -> Generator[Visit, Report, list[float]]:
        """Runs steps; returns the times of those that count."""
        is_change = arm != self._arm
        self._arm = arm
        report = yield Visit(arm, num_steps)
        self._num_steps += num_steps
        self._num_steps_of[arm] += num_steps
        known = [s for s in report.seconds if not math.isnan(s)]
        if is_change:
            self._change_s.append(report.change_s)
        return known

    @property
    def _base_s(self) -> float:
        return typical_s(self.visits, 0)

    @property
    def _change_steps(self) -> float:
        """The longest change of plan so far, in steps with the user's plan."""
        return max(self._change_s, default=limits.UNKNOWN_CHANGE * self._base_s) / self._base_s

    @property
    def lost_s(self) -> float:
        """The time so far minus the time of the same number of steps with the user's plan.

        Steps count with the typical time of their plan, because the same steps might have been slow with the user's
        plan, too; so steps with the user's plan cost nothing. The excess of a first step after a change counts with its
        median.
        """
        timed = {visit.arm: typical_s(self.visits, visit.arm) for visit in self.visits}
        slower_s = (
            -sum(self._num_steps_of[arm] * gain.gain for arm, gain in gains([self.visits]).items()) * self._base_s
        )
        excess_s = [seconds - timed[arm] for arm, seconds in self._settling if arm in timed]
        settling_s = statistics.median_low(excess_s) * len(self._settling) if excess_s else 0.0
        return slower_s + settling_s + sum(self._change_s)

    def _can_afford(self, arm: int) -> bool:
        """Returns whether a visit and the way back stay within the budget, and within the number of steps."""
        base_s, num_settling = self._base_s, self._num_settling_steps
        is_change = arm != self._arm
        if self._num_steps + limits.NUM_TIMED_STEPS + num_settling * (1 + (arm != 0)) > limits.MAX_STEPS:
            return False
        slowest_s = max([seconds for _, seconds in self._settling], default=base_s * (1 + limits.UNKNOWN_CHANGE))
        settling_steps = slowest_s / base_s - 1
        expected = 1.0
        if arm:
            visits = [visit for visit in self.visits if visit.arm == arm]
            guess = self._expected[arm]
            expected = (
                typical_s(visits, arm) / base_s if visits else limits.UNKNOWN_SLOWDOWN if guess is None else guess
            )
        num_slow = num_settling - 1 + limits.NUM_TIMED_STEPS
        cost = (is_change + (arm != 0)) * (self._change_steps + settling_steps) + num_slow * max(0.0, expected - 1)
        self._is_too_dear = self.lost_s / base_s + cost > self._budget_steps
        return not self._is_too_dear

    def _promising(self, active: list[int]) -> list[int]:
        """Returns the candidates that may still be worth choosing."""
        net = self._net(gains(self._all_visits))
        least = max([limits.MIN_GAIN, *(gain.low for gain in net.values())])
        return [arm for arm in active if arm not in net or net[arm].high >= least]

    def _net(self, known: Mapping[int, Gain]) -> dict[int, Gain]:
        """Returns gains minus the handicaps."""
        return {arm: Gain(*(share - self._handicaps.get(arm, 0.0) for share in gain)) for arm, gain in known.items()}

    def _winner(self, active: list[int]) -> int:
        """Returns the fastest plan that is faster than the user's beyond the noise, seen twice; 0 if none is."""
        known, visited = gains(self._all_visits), [visit.arm for visits in self._all_visits for visit in visits]
        net = self._net(known)
        sure = [
            arm
            for arm in active
            if arm in known and known[arm].low > 0 and net[arm].gain >= limits.MIN_GAIN and visited.count(arm) > 1
        ]
        return max(sure, key=lambda arm: net[arm].gain, default=0)

    def _is_decided(self, active: list[int]) -> bool:
        """Returns whether no other candidate can be better than the winner by more than 2 %."""
        winner = self._winner(active)
        if not winner:
            return False
        net = self._net(gains(self._all_visits))
        most = net[winner].gain + limits.MIN_GAIN
        return all(arm in net and net[arm].high <= most for arm in active if arm != winner)

    def _result(self, active: list[int], why: str | None = None) -> SearchResult:
        winner, known, base_s = self._winner(active), gains(self._all_visits), self._base_s
        if why is None and winner:
            why = "faster"
        elif why is None:
            why = ("too short" if self._is_too_dear else "not sure") if active else "none faster"
        net = self._net(known)
        if not winner and self._chosen and (self._chosen not in net or net[self._chosen].gain >= limits.MIN_GAIN):
            winner = self._chosen
        return SearchResult(
            arm=winner,
            gains=known,
            base_s=base_s,
            num_steps=self._num_steps,
            lost_s=self.lost_s,
            why=why,
            has_more=any(arm not in known for arm in self._candidates),
        )
