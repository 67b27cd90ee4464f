"""The phases of a step, from Lightning's hooks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.lightning import Callback, is_validation_next
from lightning_commopt.sync.ddp.manual_backward import ManualBackwardCheck
from lightning_commopt.sync.ddp.observed import before_backward, observe_wrapped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class PhaseCallback(Callback):
    """A callback whose subclasses are notified of the phases of a step; see `measure.record.PHASES`.

    A subclass that overrides one of Lightning's hooks here must call it.
    """

    _between = "other"
    _global_step = 0  # the Trainer's count of optimizer steps, read when training starts
    _has_stepped = False  # whether an optimizer of the Trainer has since the last batch, which may go uncounted
    _has_optimizers = True  # whether the Trainer has any with parameters; without one each batch is a step
    _is_in_epoch = False  # whether a batch of the epoch has begun; before, a LearningRateFinder may take steps
    _handles: tuple[RemovableHandle, ...] = ()
    _manual_backward_check: ManualBackwardCheck | None = None

    @abstractmethod
    def _enter(self, phase: str | None) -> None:
        """A phase begins and the last one ends; with None, what follows belongs to no step."""

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        """A batch has ended; called before the next phase. Several optimizers in one batch make one step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        observe_wrapped(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An earlier fit has left its hooks if another callback's `on_exception` raised before this one's.
        self._remove_hooks()
        # Under manual optimization another forward may follow backward; otherwise hooks and schedulers do.
        self._between = "other" if pl_module.automatic_optimization else "forward"
        self._global_step, self._has_stepped, self._is_in_epoch = trainer.global_step, False, False
        groups = [group for one in trainer.optimizers for group in one.param_groups]
        self._has_optimizers = any(is_lazy(x) or x.numel() for group in groups for x in group["params"])
        self._manual_backward_check = ManualBackwardCheck(trainer.strategy.model, pl_module, trainer.optimizers)
        self._handles = tuple(
            optimizer.register_step_post_hook(self._on_stepped)
            for optimizer in trainer.optimizers
            if hasattr(optimizer, "register_step_post_hook")
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._is_in_epoch = True
        self._enter("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._manual_backward_check is not None:
            self._manual_backward_check.close()
        before_backward(trainer.strategy.model)
        self._enter("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter(self._between)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._enter("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        global_step = trainer.global_step
        # The Trainer counts no steps that a program takes with ``optimizers(use_pl_optimizer=False)``.
        has_stepped = global_step > self._global_step or self._has_stepped or not self._has_optimizers
        self._global_step, self._has_stepped = global_step, False
        self._end_batch(trainer, batch, has_stepped)
        self._enter("data")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.validating or trainer.sanity_checking:
            self._enter(None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._enter("data")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_in_epoch = False
        self._enter(None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _on_stepped(self, *args: Any) -> None:
        if self._is_in_epoch:
            self._has_stepped = True
            self._enter(self._between)

    def _release(self) -> None:
        self._remove_hooks()
        self._enter(None)

    def _remove_hooks(self) -> None:
        if self._manual_backward_check is not None:
            self._manual_backward_check.close()
        for handle in self._handles:
            handle.remove()
        self._handles = ()


def batch_follows(trainer: Trainer) -> bool:
    """Returns whether the loop waits for a batch next, not for a validation or its end."""
    if trainer.fit_loop.epoch_loop.done:
        return False
    return trainer.validating or not is_validation_next(trainer)
