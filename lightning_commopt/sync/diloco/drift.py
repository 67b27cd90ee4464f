"""What exchanges show about the workers: their losses, and how far they have drifted apart."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.text.formatting import grouped
from lightning_commopt.text.validation import warn

_NUM_ROUNDS = 3
"""Number of rounds in a row in which the drift must grow before there is a warning."""
_GROWTH = 2.0
"""Minimum growth of the drift over these rounds for a warning: the drift of a stable training varies from round to
round, while that of a diverging one doubles in a single round."""


class DriftWatch:
    """Turns the reports of exchanges into values for loggers, and warns once per fit if a fragment's drift grows.

    ``ranks_per_worker`` consecutive ranks form one worker.
    """

    def __init__(self, ranks_per_worker: int = 1) -> None:
        self._ranks_per_worker = ranks_per_worker
        self._drifts: defaultdict[int, list[float]] = defaultdict(list)
        self._has_warned = False

    def metrics(self, index: int, reports: Sequence[Report]) -> dict[str, float]:
        """Returns values for loggers: the mean drift of a fragment, and the loss of each worker that has one."""
        drift = math.fsum(report.drift for report in reports) / len(reports)
        self._check(index, drift)
        metrics = {f"diloco/drift/fragment_{index}": drift}
        for worker, losses in grouped((int(x.rank) // self._ranks_per_worker, x.loss) for x in reports).items():
            loss = math.fsum(losses) / len(losses)
            if not math.isnan(loss):
                metrics[f"diloco/loss/worker_{worker}"] = loss
        return metrics

    def _check(self, index: int, drift: float) -> None:
        drifts = self._drifts[index] = [*self._drifts[index][-_NUM_ROUNDS:], drift]
        if self._has_warned:
            return
        if len(drifts) > _NUM_ROUNDS and drifts == sorted(set(drifts)) and drifts[-1] > _GROWTH * drifts[0]:
            self._has_warned = True
            shown = ", ".join(f"{value:.3g}" for value in drifts)
            warn(
                f"DiLoCo: the norm of the workers' changes between two exchanges of fragment {index} has grown in"
                f" {_NUM_ROUNDS} rounds in a row ({shown}). If the loss grows, too, lower outer_lr, or the learning"
                " rate of the model's optimizer: the higher one of them is, the lower the other one must be."
            )
