"""Host: the training that a tuner runs in, a fit of a Trainer or a loop on Fabric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import MisconfigurationException, batches_that_stepped
from lightning_commopt.plan import CommPlan

Method = tuple[Any, str]
"""An object, and the name of a method that is called through it; see `wrap_method`."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a tuner needs of the training that it tunes.

    Attributes:
        strategy: has the plan, the observers of gradient sync, the ranks and their device.
        model: returns the wrapper that is tuned.
        apply_plan: changes its plan at once; only called where a step begins.
        step: returns the number of optimizer steps so far.
        num_steps_left: returns how many are to come; infinity if unknown.
        accumulated: batches in a step; None if unknown. Plans that were chosen before hold for the same number only.
        begin_backward: called before every backward, or before each that is synchronized.
        end_backward: called after the same backwards, when gradients are averaged.
        forwards: called with the inputs of every forward; without it the tuner gets batches.
        pauses: steps in which one of these is called do not count.
        end: called on all ranks where the training ends.
    """

    strategy: Any
    model: Callable[[], DistributedDataParallel]
    apply_plan: Callable[[CommPlan], None]
    step: Callable[[], int]
    num_steps_left: Callable[[], float]
    accumulated: Any
    begin_backward: Method
    end_backward: Method
    forwards: Sequence[Method] = ()
    pauses: Sequence[Method]
    end: Sequence[Method] = ()


def host_of_fit(strategy: Any) -> Host:
    """Returns the fit that a strategy for a Trainer is in."""
    trainer = strategy.lightning_module.trainer

    def num_steps_left() -> float:
        try:
            return float(trainer.estimated_stepping_batches - batches_that_stepped(trainer))
        except MisconfigurationException:  # accumulation that changes from epoch to epoch
            return math.inf

    return Host(
        strategy=strategy,
        model=lambda: strategy.model,
        apply_plan=strategy.apply_plan,
        step=lambda: batches_that_stepped(trainer),
        num_steps_left=num_steps_left,
        accumulated=trainer.accumulate_grad_batches,
        begin_backward=(strategy, "pre_backward"),
        end_backward=(strategy, "post_backward"),
        pauses=[(strategy, "on_validation_start"), (strategy, "save_checkpoint")],
        end=[(strategy, "on_train_end")],
    )
