"""CountsSteps: which optimizer steps of a Trainer count for DiLoCo, and when the exchanges after them take place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_commopt.compat.lightning import batches_that_stepped, skips_backward
from lightning_commopt.strategy.living_collectives import LivingCollectives
from lightning_commopt.strategy.loss_scale import agree_on_loss_scale, loss_scale
from lightning_commopt.sync.diloco.drift import DriftWatch
from lightning_commopt.sync.diloco.exchange import Arrived
from lightning_commopt.sync.strategies import trainer_of


class CountsSteps(LivingCollectives):
    """The part of a strategy with `Rounds` that passes the first optimizer's steps to them, and logs exchanges.

    With manual optimization, optimizers step within the training step, where further losses may wait for their
    backward. Autograd refuses a backward through weights that an exchange has changed since the forward, so exchanges
    follow the training step.
    """

    _drift_watch: DriftWatch
    _is_first_batch = True
    _is_in_training_step = False
    _num_uncounted_steps = 0
    _has_stepped = False  # whether steps of this batch were counted

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._can_skip_step():
            return torch.zeros((), device=self.root_device, requires_grad=True)
        self._is_in_training_step, self._num_uncounted_steps = True, 0
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._is_in_training_step = False
        self._count_steps()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.rounds is not None and isinstance(loss, Tensor):
            self.rounds.counts.add_loss(loss)
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.rounds is not None:
            self.rounds.expect_changes()  # a training step may freeze parameters before it ends
            if optimizer is self.optimizers[0] and not skips_backward(trainer_of(self)):
                self._num_uncounted_steps += 1
                if not self._is_in_training_step:
                    self._count_steps()
        return output

    def _count_steps(self) -> None:
        """Passes the steps since the last call to the rounds, and takes part in the exchanges that are due."""
        num_steps, self._num_uncounted_steps = self._num_uncounted_steps, 0
        if self.rounds is None or not num_steps:
            return
        self._has_stepped = True
        scale, has_signal = partial(loss_scale, self.precision_plugin), lambda: self._guards.has_signal
        num_batches = 1 + batches_that_stepped(trainer_of(self))
        for index, arrived in self.rounds.step(scale, has_signal, num_steps, num_batches):
            self._has_agreed_on_signal |= any(report.has_signal for report in arrived.reports)
            agree_on_loss_scale(self.precision_plugin, [report.loss_scale for report in arrived.reports])
            self._log(index, arrived)

    def _can_skip_step(self) -> bool:
        """Returns whether this rank may skip training on a batch, because it has to catch up with the others.

        The training step then returns a loss that has no gradients, which changes no weights. The first batch of an
        epoch is not skipped, so that every rank has logged values to reduce.
        """
        module = self.lightning_module
        assert module is not None
        return (
            self.rounds is not None
            and self.rounds.is_behind
            and not self._is_first_batch
            and module.automatic_optimization
            and getattr(self.precision_plugin, "scaler", None) is None  # a scaler needs gradients
        )

    def _log(self, index: int, arrived: Arrived) -> None:
        metrics, trainer = self._drift_watch.metrics(index, arrived.reports), trainer_of(self)
        for logger in trainer.loggers if self.is_global_zero else ():
            logger.log_metrics(metrics, step=batches_that_stepped(trainer))
