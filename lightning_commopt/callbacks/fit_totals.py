"""FitTotals: accumulates `CommTimeMonitor`'s steps of a whole fit, without the warm-up, for its summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_commopt.callbacks.publisher import StepFiles
from lightning_commopt.measure.operations import OperationTotals
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.statistics import QUANTITIES, Steps
from lightning_commopt.measure.summary import FitSummary
from lightning_commopt.metrics import StepStatistics
from lightning_commopt.text.terminal import TextConsole


class FitTotals:
    """The steps of all ranks, and the collectives of this rank.

    Attributes:
        world_size: number of ranks.
        num_gathered: number of steps that were added, including the warm-up.
    """

    def __init__(self, world_size: int, num_warmup_steps: int) -> None:
        self.world_size, self._num_warmup_steps = world_size, num_warmup_steps
        self._statistics = StepStatistics(world_size=world_size)
        self._operations = OperationTotals(num_warmup_steps)
        self.num_gathered = 0

    def add(self, values: NDArray[np.float64], steps: Steps) -> None:
        """Adds steps of all ranks, ``(world_size, n, num_quantities)``; ``steps`` has the same values."""
        num_warmup = max(0, self._num_warmup_steps - self.num_gathered)
        self.num_gathered += values.shape[1]
        self._statistics.update(values[:, num_warmup:] if num_warmup else steps)

    def add_collectives(self, records: Sequence[StepRecord]) -> None:
        """Adds the collectives of this rank's steps."""
        self._operations.add(records)

    def add_own(self, rows: Sequence[Sequence[float]]) -> None:
        """Adds steps of this rank alone, unless steps of all ranks have been added."""
        if self._statistics.steps.num_ranks <= 1 and rows:
            values = np.array([rows])[:, :, : len(QUANTITIES)]
            self.add(values, Steps.of(values))

    def summary(self, **about: Any) -> FitSummary | None:
        """Returns the summary; None if all steps were warm-up. For ``about`` see `FitSummary.of`."""
        if not (steps := self._statistics.steps).num_steps:
            return None
        about |= {"operations": self._operations.operations(), "host_bound_share": self._operations.host_bound_share}
        return FitSummary.of(steps, world_size=self.world_size, **about)


def print_summary(summary: FitSummary, files: StepFiles | None, *, has_forecasts: bool) -> None:
    """Prints the table and the verdict of a fit, and the next command for its files."""
    # If nobody reads stdout any more, rich would end the process in the middle of the end of the fit.
    with suppress(OSError, ValueError, SystemExit):
        console = TextConsole()
        console.print(summary.table())
        if files is not None:
            files.print_next_command(console, has_forecasts=has_forecasts)
