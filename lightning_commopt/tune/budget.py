"""Budget: how many steps of a fit calibrations and searches may cost."""

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
    num_calibrations: int = 0

    def measuring_limit_s(self, base_s: float) -> float:
        """Returns the seconds that a calibration may take to measure compressors, on every rank.

        ``base_s`` is the time of a step with the user's plan.
        """
        return limits.MEASURING_SHARE * self.max_regret * self._known_steps * base_s

    @property
    def needed_steps(self) -> int:
        """The fewest steps of a fit that can pay for one more calibration and a search."""
        # A search needs as many changes of the plan as a calibration at least.
        num_changes = limits.MIN_CHANGES * (2 + self.num_calibrations)
        return math.ceil(num_changes * limits.MIN_CHANGE_STEPS / self.max_regret)

    @property
    def num_left(self) -> float:
        """Steps that are known to follow, 0 if their number is unknown."""
        return 0 if math.isinf(self.num_steps) else self.num_steps - self.num_done

    def allows_calibration(self, base_s: float) -> bool:
        """Returns whether a calibration can be paid for beside steps of ``base_s``."""
        if self._known_steps < self.needed_steps:
            return False
        # A fit of known length measures what it can pay for. In one of unknown length the budget still grows.
        return not math.isinf(self.num_steps) or self.measuring_limit_s(base_s) >= self.measuring_s

    @property
    def _known_steps(self) -> float:
        return self.num_done if math.isinf(self.num_steps) else self.num_steps
