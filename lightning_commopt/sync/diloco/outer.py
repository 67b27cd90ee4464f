"""The outer optimizer, which moves the global weights by the mean of the workers' changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_commopt.compat.lightning import num_steps_of
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.text.formatting import count
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_MIN_EXCHANGES, _MIN_STEPS, _SAFE_MOMENTUM = 1.4, 3, 0.5
"""A momentum counts as too large if a fit has fewer exchanges than 1.4 / (1 - momentum) ** 2.5, or if it is above 0.5
and there are fewer than 3 / (1 - momentum) steps between two exchanges. With mixing, which holds back a share of each
move, (1 - momentum) / (1 - mixing) takes the place of 1 - momentum. These are judgements from fits of
``benchmarks/diloco.py`` on two ranks with 20 to 333 exchanges, 10 to 100 steps apart: without mixing, momenta that
count as too large lost 0.8 to 20 points of accuracy compared with the best one of the same fit, the others at most 2;
see ``docs/evidence/diloco.md``."""

MEAN_OF_WEIGHTS = "with outer_lr=1.0 and outer_momentum=0.0, the mean of the weights"
"""What to compare with when there are several workers, besides a smaller momentum."""


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

    def update(self, buffer: Tensor | None, difference: Tensor) -> Tensor:
        """Returns the update, which times ``lr`` is subtracted from the global weights.

        It is ``buffer`` or ``difference`` itself.

        Args:
            buffer: the momentum, of any shape, which is updated in place; None without momentum.
            difference: the global weights at the last exchange minus the mean of the workers' weights, of the same
                shape; overwritten.
        """
        if buffer is None:
            return difference
        buffer.mul_(self.momentum).add_(difference)
        return difference.add_(buffer, alpha=self.momentum) if self.nesterov else buffer

    def move(self, weights: Tensor, buffer: Tensor | None, difference: Tensor) -> None:
        """Writes the new weights over the mean difference; see `update`."""
        # On CPU, allocating memory for the new weights would take as long as the whole update.
        torch.add(weights, self.update(buffer, difference), alpha=-self.lr, out=difference)

    def new_buffer(self, weights: Tensor) -> Tensor | None:
        """Returns the initial momentum buffer; None without momentum."""
        return weights.new_zeros(weights.shape) if self.momentum else None


def warn_of_short_fit(trainer: Trainer, plan: DiLoCoPlan, otherwise: str) -> None:
    """Warns once if the outer momentum is likely to be too large for a short fit.

    ``otherwise`` is what the warning recommends to compare with, besides a smaller momentum.
    """
    if not getattr(trainer, "fast_dev_run", False):
        # Only the training step knows how many steps it takes under manual optimization; Lightning counts batches.
        is_manual = not trainer.lightning_module.automatic_optimization
        warn_of_few_steps(num_steps_of(trainer), plan, otherwise, " if each batch is a step" if is_manual else "")


def warn_of_few_steps(num_steps: float, plan: DiLoCoPlan, otherwise: str, condition: str = "") -> None:
    """Warns once if the outer momentum is likely to be too large for a training of few steps.

    Args:
        num_steps: number of steps; infinite if it is unknown.
        plan: the plan.
        otherwise: see `warn_of_short_fit`.
        condition: follows the number of exchanges in the message, and says under which condition it is right.
    """
    num_exchanges = num_steps / plan.sync_every
    largest = largest_momentum(num_exchanges, plan.sync_every, plan.own_share)
    if plan.outer_momentum > largest + 1e-9:
        smaller = min(9, math.floor(round(10 * largest, 9))) / 10
        others = [f"with outer_momentum={smaller:g}", otherwise] if smaller else [otherwise]
        length = "" if math.isinf(num_exchanges) else f" and {count(math.floor(num_exchanges), 'exchange')}{condition}"
        warn_once(
            f"outer_momentum={plan.outer_momentum:g} is likely to be too large for"
            f" sync_every={plan.sync_every}{length}: compare the loss {' and '.join(others)}"
        )


def largest_momentum(num_exchanges: float, sync_every: int, mixing: float = 0.0) -> float:
    """Returns the largest momentum that is likely to suit a fit.

    >>> [round(largest_momentum(*fit), 2) for fit in [(100, 30), (300, 10), (math.inf, 30), (3, 30), (100, 30, 0.5)]]
    [0.82, 0.7, 0.9, 0.26, 0.91]
    """
    by_exchanges = 1 - (1 - mixing) * math.pow(_MIN_EXCHANGES / max(1.0, num_exchanges), 1 / 2.5)
    by_steps = max(_SAFE_MOMENTUM, 1 - (1 - mixing) * _MIN_STEPS / sync_every)
    return max(0.0, min(by_exchanges, by_steps))
