"""Look: a typical step time of a plan that training continues with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_NUM_BLOCKS = 5
"""Blocks of a look. During a watch they have 20 steps each, so that it matters little if the host's clock is ahead by a
few steps, and the median over five of them ignores a disturbed one."""

_SIGMA_OF_SPREAD = 1.4826
"""Standard deviation of normally distributed values over the median of their absolute distances from their median."""


class Look(NamedTuple):
    """The typical time of a step over many, and its noise.

    Blocks of steps are compared, as a host's clock may be ahead of a device by some steps.
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
        noise = _SIGMA_OF_SPREAD * statistics.median([abs(mean - center) for mean in means]) / math.sqrt(_NUM_BLOCKS)
        return cls(math.exp(center), noise)
