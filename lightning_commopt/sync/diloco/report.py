"""Report: what ranks tell each other beside a fragment, and whether they are in the same exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from lightning_commopt.sync.diloco.errors import UnequalStepsError
from lightning_commopt.text.formatting import list_some

AT_END, BETWEEN_BATCHES = -1, -2
"""Where a rank is, in place of the number of a batch, while it takes part in no exchange of a training."""


@dataclass(frozen=True)
class Report:
    """What each worker sends beside a fragment.

    Attributes:
        samples: number of samples since the last exchange of this fragment, its weight in the mean.
        loss_scale: scale of its gradient scaler; 0 without one.
        loss: mean loss of its training steps since the last exchange of any fragment; NaN if it has none.
        drift: Euclidean norm of its weights' difference from the global ones, which the exchange sets.
        rank: its rank, as some may be missed.
        has_signal: 1 if it has received a signal to end or to save, and 0 otherwise.
        trained: checksum of the parameters that were trained, which the exchange sets.
        num_steps: number of its optimizer steps so far.
        batch: number of the batch that it trains on, from 1; 0 in Fabric, which knows none; or `AT_END` of the
            training, or `BETWEEN_BATCHES`.
    """

    samples: float
    loss_scale: float = 0.0
    loss: float = math.nan
    drift: float = 0.0
    rank: float = 0.0
    has_signal: float = 0.0
    trained: float = 0.0
    num_steps: float = 0.0
    batch: float = AT_END

    def to_plain(self) -> list[float]:
        """Returns what a checkpoint keeps: what is used when the exchange is applied.

        The signal is left out, which a fit that resumes from it has not received.
        """
        return [self.samples, self.loss_scale, self.loss, self.drift, self.rank]

    def to_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64, device="cpu")


def check_same_step(reports: Sequence[Report], ranks: Sequence[int] | None = None) -> None:
    """Compares where the ranks are. Outside of exchanges they may have taken different numbers of steps.

    The ``ranks`` are the numbers of those that have sent the ``reports``; None for 0, 1 and so on.

    Raises:
        UnequalStepsError: ranks are in different exchanges, or in different batches.
    """
    if len({(report.batch, report.num_steps if report.batch >= 0 else 0) for report in reports}) > 1:
        numbers = range(len(reports)) if ranks is None else ranks
        places = [f"rank {rank} {_place(report)}" for rank, report in zip(numbers, reports, strict=True)]
        raise UnequalStepsError(
            f"Ranks have taken different numbers of optimizer steps: {list_some(places, 8)}. All ranks must step the"
            " first optimizer in the same batches. To leave out a step on some of them only, call zero_grad() and then"
            " step() there."
        )


def _place(report: Report) -> str:
    words = {AT_END: "has ended after", BETWEEN_BATCHES: "is after"}.get(int(report.batch), "is at")
    batch = f" in batch {report.batch:.0f}" if report.batch > 0 else ""
    return f"{words} step {report.num_steps:.0f}{batch}"
