"""Counts: the samples and losses of one rank since its last exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_commopt.sync.diloco.report import Report


@dataclass
class Counts:
    """The samples that one rank has trained on, and their losses.

    Attributes:
        samples: number of samples so far.
        samples_before: for each fragment, the number of samples at its last exchange.
        losses: sum of the losses since the last exchange of any fragment.
        num_losses: number of these losses.
    """

    samples: float = 0.0
    samples_before: list[float] = field(default_factory=list)
    losses: Tensor | float = 0.0
    num_losses: int = 0

    def add_loss(self, loss: Tensor) -> None:
        """Adds the mean of the loss that a training step returns, without waiting for the device.

        Under manual optimization a step may return a tensor with several losses.
        """
        self.losses = self.losses + loss.detach().float().mean()
        self.num_losses += 1

    def report(self, index: int, **others: float) -> Callable[[], Report]:
        """Returns a function that creates the report for a fragment, and resets the counts of that fragment.

        The function may wait for the device, so a thread should call it.
        """
        samples, losses, number = self.samples - self.samples_before[index], self.losses, self.num_losses
        self.samples_before[index], self.losses, self.num_losses = self.samples, 0.0, 0
        rank = dist.get_rank() if dist.is_initialized() else 0
        return lambda: Report(samples, loss=float(losses) / number if number else math.nan, rank=rank, **others)

    def forget(self, num_fragments: int) -> None:
        """Drops what was counted since the last exchanges."""
        self.samples_before, self.losses, self.num_losses = [self.samples] * num_fragments, 0.0, 0

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "losses": float(self.losses)}

    def load_plain(self, saved: Mapping[str, Any]) -> None:
        vars(self).update({name: saved[name] for name in vars(self)})
