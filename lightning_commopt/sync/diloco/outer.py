"""The outer optimizer, which moves the global weights by the mean of what the workers have changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_commopt.compat.lightning import num_steps_of
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TIME_CONSTANTS = 20
"""How many times 1 / (1 - momentum) exchanges a fit should have. In ``benchmarks/diloco.py``, 20 exchanges cost
twice as much loss with a momentum of 0.9 as with 0.5 or none, and 100 exchanges cost least with 0.7 on two ranks."""

MEAN_OF_WEIGHTS = "with outer_lr=1.0 and outer_momentum=0.0, the mean of the weights"
"""What to compare with, beside a smaller momentum, when there are several workers."""


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
        """Returns what the global weights lose, times ``lr``; it is ``buffer`` or ``difference`` itself.

        Args:
            buffer: the momentum, of any shape, which is updated in place; None without momentum.
            difference: the global weights at the last exchange minus the mean of the workers' weights, of the same
                shape; overwritten.
        """
        if buffer is None:
            return difference
        buffer.mul_(self.momentum).add_(difference)
        return difference.add_(buffer, alpha=self.momentum) if self.nesterov else buffer

    def new_buffer(self, weights: Tensor) -> Tensor | None:
        """Returns the momentum to start with; None if there is none."""
        return weights.new_zeros(weights.shape) if self.momentum else None


def warn_if_short(trainer: Trainer, plan: DiLoCoPlan, otherwise: str) -> None:
    """Warns once if the momentum of the outer optimizer is likely to cost quality in so short a fit.

    Args:
        trainer: of the fit, whose data are loaded.
        plan: of which ``outer_momentum`` and ``sync_every`` count.
        otherwise: what to compare with, besides a smaller momentum.
    """
    if not getattr(trainer, "fast_dev_run", False):
        warn_if_few_steps(num_steps_of(trainer), plan, otherwise)


def warn_if_few_steps(num_steps: float, plan: DiLoCoPlan, otherwise: str) -> None:
    """Warns like `warn_if_short` of a training with ``num_steps`` optimizer steps."""
    num_needed = round(_TIME_CONSTANTS / (1 - plan.outer_momentum))
    if plan.outer_momentum and num_steps < num_needed * plan.sync_every:
        num_exchanges = num_steps // plan.sync_every
        fitting = max(0, math.floor(10 * (1 - _TIME_CONSTANTS / max(1, num_exchanges)))) / 10
        others = [f"with outer_momentum={fitting:g}", otherwise] if fitting else [otherwise]
        warn_once(
            f"outer_momentum={plan.outer_momentum:g} suits fits of at least {num_needed} exchanges, and this one has"
            f" {num_exchanges:.0f} ({num_steps:.0f} optimizer steps, sync_every={plan.sync_every}): compare the loss"
            f" {' and '.join(others)}"
        )
