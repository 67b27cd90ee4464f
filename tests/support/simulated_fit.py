"""A fit without training: step times of several plans with noise, driven by a tuner's director."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from lightning_commopt.tune.director import Director
from lightning_commopt.tune.search import Report, Visit

NOISES = ("none", "small", "medium", "large", "tails", "wandering", "bursts")
HEAVY_NOISES = ("outliers", "loaded", "drift")
"""More than step times can be compared under."""
_NUM_START_STEPS = 3
_CHANGE_S = _SETTLING_S = 0.5  # what changing the plan takes, and how much longer the first step after it does


class Change(NamedTuple):
    """Other times of all plans, from a step on: the link has changed."""

    at_step: int
    arms_s: Sequence[float]


class Driven(Director):
    """A director that knows its candidates from the start: it searches at once, or only watches plan ``arm``."""

    def __init__(
        self,
        expected: Sequence[float | None],
        num_steps: float,
        *,
        arm: int = 0,
        handicaps: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__(num_steps, arm=arm)
        if not arm:
            self._begin(expected, handicaps=handicaps)
            self.visit, self._direct = Visit(0, 0), self._search_and_watch()
            self.visit = next(self._direct)

    def _search_and_watch(self) -> Generator[Visit, Report, None]:
        yield from self._search()
        yield from self._watch_and_search()


class Outcome(NamedTuple):
    """How a fit went.

    Attributes:
        total_s: its time.
        ratio: that over that of the same fit with the user's plan alone, under the same noise.
        arm: the plan at the end.
    """

    total_s: float
    ratio: float
    arm: int
    director: Driven


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
    change: Change | None = None,
    expected: Sequence[float | None] | None = None,
    known_steps: float | None = None,
) -> Outcome:
    """Trains for ``num_steps`` steps.

    Args:
        arms_s: time of a step with each plan, the user's first.
        num_steps: of the fit.
        kind: of `NOISES`.
        seed: of the noise.
        change: of the times, within the fit.
        expected: see `Search`.
        known_steps: number of steps that the director is told.
    """
    rng = random.Random(seed)
    factors = list(islice(noise(kind, rng), num_steps))
    director = Driven(expected or [None] * len(arms_s), num_steps if known_steps is None else known_steps)
    times = [change.arms_s if change and step >= change.at_step else arms_s for step in range(num_steps)]
    present, step, total_s, change_times = 0, 0, 0.0, [0.0]
    while step < num_steps:
        visit, seconds, changing_s = director.visit, list[float](), 0.0
        if visit.arm != present:
            present, changing_s = visit.arm, _CHANGE_S * rng.uniform(0.7, 1.3)
            change_times.append(changing_s)
        for index in range(min(visit.num_steps, num_steps - step)):
            start_s = 1.0 if step < _NUM_START_STEPS else _SETTLING_S if changing_s and not index else 0.0
            seconds.append(times[step][present] * factors[step] + start_s)
            step += 1
        total_s += sum(seconds) + changing_s
        if len(seconds) == visit.num_steps:
            director.advance(Report(tuple(seconds), changing_s))
    alone_s = sum(of_step[0] * factor for of_step, factor in zip(times, factors, strict=True)) + _NUM_START_STEPS
    return Outcome(total_s, total_s / alone_s, present, director)
