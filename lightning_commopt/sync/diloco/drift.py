"""What an exchange tells about the workers: their losses, and how far they have drifted apart."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from lightning_commopt.sync.diloco.report import Report
from lightning_commopt.text.formatting import grouped
from lightning_commopt.text.validation import warn

_NUM_ROUNDS = 3
_GROWTH = 2.0
"""Growth of the drift over `_NUM_ROUNDS` rounds beneath which there is no warning: the drift of a stable training
varies from round to round, and that of one that diverges doubles in one."""


class DriftWatch:
    """Turns the reports of exchanges into values for loggers, and warns once in a fit if a fragment's drift grows.

    A worker is formed by ``ranks_per_worker`` consecutive ranks.
    """

    def __init__(self, ranks_per_worker: int = 1) -> None:
        self._ranks_per_worker = ranks_per_worker
        self._drifts: defaultdict[int, list[float]] = defaultdict(list)
        self._has_warned = False

    def metrics(self, index: int, reports: Sequence[Report]) -> dict[str, float]:
        """Returns the mean drift of a fragment and the loss of each worker that has one, by their names in loggers."""
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
                f"DiLoCo: what the workers change between two exchanges of fragment {index} has grown in {_NUM_ROUNDS}"
                f" rounds (norms {shown}). If the loss grows too: a higher inner learning rate wants a lower outer_lr."
            )
