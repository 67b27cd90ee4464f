"""Budget: what calibrations and searches of a fit may cost, and what they have cost so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_commopt.tune import limits


@dataclass(kw_only=True)
class Budget:
    """The steps that a fit can spend on calibrations and searches; if its length is unknown, they grow with the fit."""

    num_steps: float  # steps that the fit will still take; if unknown, infinity, and the steps so far pay for searches
    max_regret: float  # share of the fit's time, over all its steps, that searching may cost
    measuring_s: float  # seconds that a calibration takes to measure the compressors, if nothing disturbs it
    num_done: int = 0  # steps trained so far
    base_steps: float = 0.0  # time trained so far, in steps with the user's plan of today's length
    lost_steps: float = 0.0  # what calibrations and searches have cost, minus half of what was saved, in such steps
    measured_s: float = 0.0  # seconds that calibrations have taken between steps

    def measuring_limit_s(self, base_s: float) -> float:
        """Returns the seconds that a calibration may take to measure compressors, on every rank.

        ``base_s`` is the time of a step with the user's plan.
        """
        limit_s = limits.MEASURING_SHARE * self.max_regret * self._known_steps * base_s
        return max(0.0, limit_s - self.measured_s)

    def search_steps(self, *, is_first: bool) -> float:
        """Returns what a search may cost."""
        share = limits.FIRST_SHARE if is_first else limits.ALL_SHARE
        return share * self.max_regret * self._known_steps - self.lost_steps

    @property
    def needed_steps(self) -> int:
        """The fewest steps of a fit that can pay for one more calibration and a search."""
        # A calibration changes the plan twice, and so does a search for each candidate, of which there may be only one.
        cost_steps = 2 * limits.MIN_CHANGES * limits.MIN_CHANGE_STEPS + max(0.0, self.lost_steps) / limits.FIRST_SHARE
        return math.ceil(cost_steps / self.max_regret)

    def allows_calibration(self, base_s: float) -> bool:
        """Returns whether a calibration can be paid for beside steps of ``base_s``."""
        if self._known_steps < self.needed_steps:
            return False
        # A fit of known length measures what it can pay for. In one of unknown length the budget still grows.
        return not math.isinf(self.num_steps) or self.measuring_limit_s(base_s) >= self.measuring_s

    def rescale(self, factor: float) -> None:
        """Expresses what has passed in steps of another length: ``factor`` is the earlier length over the new one."""
        self.base_steps *= factor
        self.lost_steps *= factor

    @property
    def _known_steps(self) -> float:
        """Steps that were trained or are known to follow."""
        return self.base_steps + (0 if math.isinf(self.num_steps) else self.num_steps - self.num_done)
