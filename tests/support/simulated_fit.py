"""A fit without training: step times of several plans with noise, driven by a tuner's director."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from lightning_commopt.cost.predict import Candidate, Prediction
from lightning_commopt.plan import CommPlan
from lightning_commopt.tune import limits
from lightning_commopt.tune.calibration import MAX_CANDIDATES, Shortlist, unpredicted
from lightning_commopt.tune.director import CALIBRATE, Director
from lightning_commopt.tune.search import Report, Visit

NOISES = ("none", "small", "medium", "large", "tails", "wandering", "bursts")
HEAVY_NOISES = ("outliers", "loaded", "drift")
"""More than step times can be compared under."""
_CHANGE_S = _SETTLING_S = 0.5  # what changing the plan takes, and how much longer the first step after it does


class Change(NamedTuple):
    """Other times of all plans, from a step on: the link has changed."""

    at_step: int
    arms_s: Sequence[float]


class Driven(Director):
    """A director that knows its candidates from the start: it searches at once, or only watches plan ``arm``.

    It never calibrates.
    """

    def __init__(
        self,
        expected: Sequence[float | None],
        num_steps: float,
        *,
        arm: int = 0,
        handicaps: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(num_steps, arm=arm, is_predictable=False)
        self.shortlist = unpredicted(CommPlan(), [])
        if not arm:
            self._begin(expected, handicaps=handicaps)
            self.visit, self._direct = Visit(0, 0), self._search_and_watch()
            self.visit = next(self._direct)

    def _search_and_watch(self) -> Generator[Visit, Report, None]:
        self.is_searching = True
        yield Visit(0, limits.NUM_START_STEPS)
        yield from self._search()
        yield from self._watch_and_search()


class Outcome(NamedTuple):
    """How a fit went.

    Attributes:
        total_s: its time.
        ratio: that over that of the same fit with the user's plan alone, under the same noise.
        arm: the plan at the end.
        calibrated_at: the steps at which the user's plan was observed.
    """

    total_s: float
    ratio: float
    arm: int
    director: Director
    calibrated_at: tuple[int, ...] = ()


class Predictions(NamedTuple):
    """How a simulated fit finds its candidates: it predicts the times of the moment, with errors.

    Attributes:
        error: standard deviation of the logarithm of a predicted time.
        failing: share of the calibrations that predict nothing.
        measuring_s: what measuring the compressors takes in each calibration, unless less is allowed.
    """

    error: float = 0.1
    failing: float = 0.1
    measuring_s: float = 3.0

    def promising(self, arms_s: Sequence[float], kept: int, rng: random.Random) -> tuple[list[int], Shortlist | None]:
        """Returns which plans a calibration makes arms of the director, and its shortlist."""
        ratios = [arm_s / arms_s[0] * math.exp(rng.gauss(0, self.error)) for arm_s in arms_s]
        found = [arm for arm in range(1, len(arms_s)) if arm != kept and ratios[arm] < 0.99]
        found = sorted(found, key=ratios.__getitem__)[:MAX_CANDIDATES]
        first = [kept] if kept else []
        plans = [CommPlan(bucket_cap_mb=arm + 1) for arm in (*first, *found)]
        if rng.random() < self.failing:
            return [0, *first], unpredicted(CommPlan(), plans[:1]) if kept else None
        base, *candidates = (
            Candidate(plan, Prediction(step_s=ratio, low_s=0.9 * ratio, high_s=1.1 * ratio, exposed_s=0.0))
            for plan, ratio in [(CommPlan(), 1.0), *zip(plans, (ratios[arm] for arm in (*first, *found)), strict=True)]
        )
        return [0, *first, *found], Shortlist(base, tuple(candidates), {})


def noise(kind: str, rng: random.Random) -> Iterator[float]:
    """Yields factors of step times."""
    level, left = 0.0, 0
    while True:
        if kind == "tails":  # one step in twenty takes at least twice as long, some ten times
            spike = rng.paretovariate(1.5) if rng.random() < 0.05 else 0.0
            yield math.exp(rng.gauss(0, 0.03)) * (1 + spike)
        elif kind == "wandering":  # by 10 %, over some twenty steps
            level = 0.95 * level + rng.gauss(0, 0.03)
            yield math.exp(level + rng.gauss(0, 0.02))
        elif kind == "outliers":  # one step in ten takes ten times as long
            yield math.exp(rng.gauss(0, 0.03)) * (10.0 if rng.random() < 0.1 else 1.0)
        elif (
            kind == "loaded"
        ):  # other processes, for a third of the time, while which steps take up to ten times as long
            left = rng.randint(5, 60) if not left and rng.random() < 0.02 else max(0, left - 1)
            yield (rng.uniform(2, 10) if left else 1.0) * math.exp(rng.gauss(0, 0.1))
        elif (
            kind == "drift"
        ):  # a machine that becomes slower by a factor of 3 within some hundred steps, and fast again
            level += rng.uniform(0, 0.02)
            yield math.exp(1.1 * math.sin(level) ** 2 + rng.gauss(0, 0.05))
        elif kind == "bursts":  # another process, for 5 to 40 steps
            left = rng.randint(5, 40) if not left and rng.random() < 0.01 else max(0, left - 1)
            yield (1.5 if left else 1.0) * math.exp(rng.gauss(0, 0.03))
        else:
            yield math.exp(rng.gauss(0, {"none": 0.0, "small": 0.02, "medium": 0.05, "large": 0.15}[kind]))


def simulate(
    arms_s: Sequence[float],
    num_steps: int,
    kind: str,
    seed: int,
    *,
    changes: Sequence[Change] = (),
    expected: Sequence[float | None] | None = None,
    known_steps: float | None = None,
    predictions: Predictions | None = None,
) -> Outcome:
    """Trains for ``num_steps`` steps.

    Args:
        arms_s: time of a step with each plan, the user's first.
        num_steps: of the fit.
        kind: of `NOISES` or `HEAVY_NOISES`.
        seed: of the noise.
        changes: of the times, in the order of their steps.
        expected: see `Search`.
        known_steps: number of steps that the director is told.
        predictions: how candidates are found; None if all plans are candidates from the start.
    """
    rng = random.Random(seed)
    factors = list(islice(noise(kind, rng), num_steps))
    told_steps = num_steps if known_steps is None else known_steps
    director: Director
    if predictions is None:
        director, arms = Driven(expected or [None] * len(arms_s), told_steps), [*range(len(arms_s))]
    else:
        director, arms = Director(told_steps, measuring_s=predictions.measuring_s), [0]
    times, calibrated_at = [arms_s] * num_steps, list[int]()
    for change in changes:
        times[change.at_step :] = [change.arms_s] * (num_steps - change.at_step)
    present, step, total_s = (0, False), 0, 0.0
    while step < num_steps:
        visit, seconds, changing_s = director.visit, list[float](), 0.0
        plan, is_observed = arms[max(0, visit.arm)], visit.arm == CALIBRATE
        if (plan, is_observed) != present:
            present, changing_s = (plan, is_observed), _CHANGE_S * rng.uniform(0.7, 1.3)
        for index in range(min(visit.num_steps or num_steps, num_steps - step)):  # 0 steps: nothing is left to decide
            start_s = 1.0 if step < limits.NUM_START_STEPS else _SETTLING_S if changing_s and not index else 0.0
            seconds.append(times[step][plan] * factors[step] + start_s)
            step += 1
        total_s += sum(seconds) + changing_s
        if step == num_steps:
            break
        if is_observed and predictions is not None:
            calibrated_at.append(step)
            arms, director.shortlist = predictions.promising(times[step - 1], arms[director.chosen], rng)
            director.aside_s = min(predictions.measuring_s, director.measuring_limit_s)
            total_s += director.aside_s
        director.advance(Report(tuple(seconds), changing_s))
    alone_s = sum(of_step[0] * factor for of_step, factor in zip(times, factors, strict=True)) + limits.NUM_START_STEPS
    return Outcome(total_s, total_s / alone_s, present[0], director, tuple(calibrated_at))
