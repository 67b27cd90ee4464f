"""The outer optimizer, which moves the global weights by the mean of what the workers have changed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """SGD with momentum on the mean difference between global and local weights, as if it were a gradient.

    It computes what ``torch.optim.SGD`` does with a momentum that starts from zero.

    Source: Douillard et al., "DiLoCo" (arXiv:2311.08105), algorithm 1.

    Attributes:
        lr: learning rate; 1 without momentum gives the mean of the workers' weights.
        momentum: share of the last update that remains in the next one.
        nesterov: whether the update looks ahead by the momentum of the next step.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, weights: Tensor, buffer: Tensor | None, difference: Tensor) -> None:
        """Moves the global weights, in place.

        Args:
            weights: the global weights at the last exchange, of any shape.
            buffer: the momentum, of the same shape, which is updated in place; None without momentum.
            difference: ``weights`` minus the mean of the workers' weights; overwritten.
        """
        if buffer is None:
            weights.add_(difference, alpha=-self.lr)
            return
        buffer.mul_(self.momentum).add_(difference)
        update = difference.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
        weights.add_(update, alpha=-self.lr)

    def new_buffer(self, weights: Tensor) -> Tensor | None:
        """Returns the momentum to start with; None if there is none."""
        return weights.new_zeros(weights.shape) if self.momentum else None
