"""History: which plan the steps of a fit ran with, and how long they took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lightning_commopt.measure.runs.record import Stretch

_MAX_NUMBERS = 1000  # kept in all: of long fits the first searches


class History:
    """Collects the visits of a fit, on rank 0, in `stretches`."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._num_steps = self._num_numbers = 0

    def add(self, plan: str, seconds: Sequence[float], *, is_timed: bool) -> None:
        """Adds a visit.

        Args:
            plan: name of it.
            seconds: of its steps; NaN where one does not count.
            is_timed: keep them all; else their mean, as the host's clock is ahead of a device by any number of steps.
        """
        first_step, num_steps = self._num_steps, len(seconds)
        self._num_steps += num_steps
        known = [s for s in seconds if not math.isnan(s)]
        kept = seconds if is_timed else [statistics.fmean(known) if known else math.nan]
        self._num_numbers += len(kept)
        if self._num_numbers > _MAX_NUMBERS:
            return
        numbers = [None if math.isnan(s) else float(f"{s:.6g}") for s in kept]
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.plan == plan and last.steps_per_number * len(kept) == num_steps:
            self.stretches.pop()
            first_step, num_steps = last.first_step, last.num_steps + num_steps
            numbers = [*last.seconds, *numbers]
        self.stretches.append(Stretch(plan=plan, first_step=first_step, num_steps=num_steps, seconds=numbers))
