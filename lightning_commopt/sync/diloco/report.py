"""Report: what ranks send each other along with a fragment, and whether they are in the same exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from lightning_commopt.sync.diloco.errors import UnequalStepsError
from lightning_commopt.text.formatting import list_some

AT_END, BETWEEN_BATCHES = -1, -2
"""Values of `Report.batch` for ranks that are not in an exchange of a training step."""


@dataclass(frozen=True)
class Report:
    """What each rank sends along with a fragment, as float64.

    Attributes:
        samples: number of samples since the last exchange of this fragment, which is the rank's weight in the mean.
        loss_scale: scale of its gradient scaler; 0 without one.
        loss: mean loss of its training steps since the last exchange of any fragment; NaN without a loss.
        drift: Euclidean norm of its weights' difference from the global ones; set by the exchange.
        rank: its number, since some ranks may be missing.
        has_signal: 1 if it has received a signal to end or to save, and 0 otherwise.
        trained: checksum of which parameters were trained; set by the exchange.
        num_steps: number of its optimizer steps so far.
        batch: number of the batch that it trains on, from 1; 0 in Fabric, where it is unknown; or `AT_END` of the
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
        """Returns the values for a checkpoint: those that are needed when the exchange is applied.

        The signal is not saved, because a fit that resumes from the checkpoint has not received it.
        """
        return [self.samples, self.loss_scale, self.loss, self.drift, self.rank]

    def to_tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.float64, device="cpu")


def check_same_step(reports: Sequence[Report], ranks: Sequence[int] | None = None) -> None:
    """Checks that all ranks are in the same batch, and in an exchange have taken the same number of steps.

    ``ranks`` has the numbers of the ranks that have sent the ``reports``; None for 0, 1 and so on.

    Raises:
        UnequalStepsError: ranks are in different exchanges, or in different batches.
    """
    if len({(report.batch, report.num_steps if report.batch >= 0 else 0) for report in reports}) > 1:
        numbers = range(len(reports)) if ranks is None else ranks
        places = [f"rank {rank} {_place(report)}" for rank, report in zip(numbers, reports, strict=True)]
        raise UnequalStepsError(
            f"Ranks have taken different numbers of optimizer steps: {list_some(places, 8)}. All ranks must step the"
            " first optimizer in the same batches. To skip an update on some ranks only, call zero_grad() and then"
            " step() there."
        )


def _place(report: Report) -> str:
    words = {AT_END: "has ended after", BETWEEN_BATCHES: "is after"}.get(int(report.batch), "is at")
    batch = f" in batch {report.batch:.0f}" if report.batch > 0 else ""
    return f"{words} step {report.num_steps:.0f}{batch}"
