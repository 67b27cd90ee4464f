"""Estimates how much faster one plan is than another, with intervals, from alternating visits; looks at one plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_commopt.tune import limits

_NUM_STANDARD_ERRORS = 3.5
"""Distance of an interval's ends from its estimate, in standard errors. Normal noise would need 3.1 for a chance of one
in a thousand on either side; visits are few, and their noise is not normal."""

_SIGMA_OF_MEDIAN = 1.2533
"""Standard error of the median of many normally distributed values over the standard error of their mean: the square
root of pi / 2."""

_SIGMA_OF_MANY = 1.4826
_SIGMA_OF_SPREAD = {2: 1.7725, 3: 1.3820}
"""Standard deviation of many normally distributed values over the median of their absolute distances from their median.
The mapping has the factor for small numbers of values."""

_PRIOR_VISITS = 4.0
"""Weight of the noise within visits, in visits, when the noise between them is estimated. A judgement: the few visits
of a search differ too little or too much by chance to be believed alone."""

_UNSEEN_SIGMA, _UNSEEN_WEIGHT = 0.03, 0.5
"""Before noise between visits was observed, it is assumed to be 3 %, with the weight of half a visit: enough that two
visits in a quiet moment do not decide, and little compared with four visits."""

_NUM_BLOCKS = 5
"""Number of blocks of a look. During a watch they have 20 steps each, so that it matters little if the host's clock is
ahead by a few steps, and the median over five of them ignores a disturbed one."""


class TimedVisit(NamedTuple):
    """Consecutive timed steps with one plan.

    Attributes:
        arm: index of the plan; 0 is the user's.
        at_step: the end of them, in steps since the search began.
        seconds: times of the steps that count; not empty.
    """

    arm: int
    at_step: float
    seconds: tuple[float, ...]

    @property
    def log_s(self) -> float:
        return statistics.median(map(math.log, self.seconds))


class Gain(NamedTuple):
    """How much shorter steps are than with the user's plan: 0.2 for steps that take 80 % of the time.

    Attributes:
        low: lower end of the 99.8 % interval.
        high: upper end.
    """

    gain: float
    low: float
    high: float


def typical_s(visits: Sequence[TimedVisit], arm: int) -> float:
    """Returns the time of a step with a plan, the median over its visits."""
    return math.exp(statistics.median([visit.log_s for visit in visits if visit.arm == arm]))


def gains(searches: Sequence[Sequence[TimedVisit]]) -> dict[int, Gain]:
    """Compares every plan that was visited with the user's.

    Searches are weighted by the inverse of their variances: one that another process has disturbed counts little.

    Args:
        searches: the visits of each, in the order of time, at least one of arm 0 in each.

    Returns:
        By arm, without 0.
    """
    weighted: dict[int, list[tuple[float, float]]] = {}
    for visits in searches:
        for arm, (log_gain, variance) in _log_gains(visits).items():
            weighted.setdefault(arm, []).append((log_gain, 1 / variance))
    known = {}
    for arm, rows in weighted.items():
        total = sum(weight for _, weight in rows)
        log_gain = sum(log_gain * weight for log_gain, weight in rows) / total
        error = _NUM_STANDARD_ERRORS / math.sqrt(total)
        known[arm] = Gain(*(1 - math.exp(-value) for value in (log_gain, log_gain - error, log_gain + error)))
    return known


def _log_gains(visits: Sequence[TimedVisit]) -> dict[int, tuple[float, float]]:
    """Returns by arm the logarithm of the user's time over the plan's, and its variance.

    The user's plan takes part in between, so its time at a visit of another plan is interpolated: what slows all
    plans down for a while favors none.
    """
    base = [visit for visit in visits if visit.arm == 0]
    places = [visit.at_step for visit in base]
    differences: dict[int, list[float]] = {}
    weights: dict[int, list[NDArray[np.float64]]] = {}
    for visit in visits:
        if visit.arm:
            # The weight that each visit of the user's plan has in the interpolation between them.
            weight = np.array([np.interp(visit.at_step, places, row) for row in np.eye(len(base))])
            at_base = float(weight @ [base_visit.log_s for base_visit in base])
            differences.setdefault(visit.arm, []).append(at_base - visit.log_s)
            weights.setdefault(visit.arm, []).append(weight)
    variance = _visit_variance(visits, differences)
    known = {}
    for arm, values in differences.items():
        shares = np.mean(weights[arm], axis=0)
        known[arm] = statistics.fmean(values), variance * (1 / len(values) + float(shares @ shares))
    return known


def _visit_variance(visits: Sequence[TimedVisit], differences: dict[int, list[float]]) -> float:
    """Returns the variance of a visit's ``log_s``, from steps within visits and differences between visits.

    Like the median of a visit, the median of absolute distances ignores single steps that took much longer.
    """
    distances = [abs(math.log(s) - visit.log_s) for visit in visits if len(visit.seconds) > 1 for s in visit.seconds]
    num_typical = statistics.median([len(visit.seconds) for visit in visits])
    spread = statistics.median(distances) * _SIGMA_OF_SPREAD.get(int(num_typical), _SIGMA_OF_MANY) if distances else 0.0
    within = (_SIGMA_OF_MEDIAN * spread) ** 2 / num_typical
    # The difference of the user's plan from one visit to the next counts in full: noise that lasts for some visits, but
    # not for all, would otherwise look like a difference between plans.
    base = [visit.log_s for visit in visits if visit.arm == 0]
    squares, freedom = sum((after - before) ** 2 / 2 for before, after in pairwise(base)), len(base) - 1
    for values in differences.values():
        mean = statistics.fmean(values)
        # A difference varies with its visit, and by about half as much with the two that the base is interpolated from.
        squares += sum((value - mean) ** 2 for value in values) / 1.5
        freedom += len(values) - 1
    unseen = (_UNSEEN_WEIGHT * _UNSEEN_SIGMA**2 + squares) / (_UNSEEN_WEIGHT + freedom)
    return max(within, (_PRIOR_VISITS * within + squares) / (_PRIOR_VISITS + freedom), unseen)


class Look(NamedTuple):
    """The typical time of a step over many, and its noise.

    Blocks of steps are compared, because a host's clock may be ahead of a device by some steps.
    """

    step_s: float
    noise: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Look | None:
        known = [s for s in seconds if not math.isnan(s)]
        size = len(known) // _NUM_BLOCKS
        if not size:
            return None
        means = [math.log(statistics.fmean(known[i * size : (i + 1) * size])) for i in range(_NUM_BLOCKS)]
        center = statistics.median(means)
        noise = _SIGMA_OF_MANY * statistics.median([abs(mean - center) for mean in means]) / math.sqrt(_NUM_BLOCKS)
        return cls(math.exp(center), noise)


class Drift:
    """Compares looks with the first one.

    Attributes:
        reference_s: time of a step in the first look.
        step_s: time of a step in the last one.
        num_shifted: number of last looks in a row in which it has changed beyond `DRIFT` and the noise.
    """

    def __init__(self) -> None:
        self.reference_s = self.step_s = math.nan
        self.num_shifted = 0

    def add(self, look: Look) -> None:
        self.step_s = look.step_s
        if math.isnan(self.reference_s):
            self.reference_s = look.step_s
        shift = abs(math.log(look.step_s / self.reference_s))
        self.num_shifted = self.num_shifted + 1 if shift > max(limits.DRIFT, limits.NUM_NOISES * look.noise) else 0
