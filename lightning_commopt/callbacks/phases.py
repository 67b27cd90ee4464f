"""The phases of a step, from Lightning's hooks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from lightning_commopt.callbacks.steps import StepWatch
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
    _steps: StepWatch | None = None  # None outside of training
    _manual_backward_check: ManualBackwardCheck | None = None

    @abstractmethod
    def _enter(self, phase: str | None) -> None:
        """Called when a phase begins, and the last one ends. With None, the time that follows belongs to no step."""

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        """Called when a batch has ended, before the next phase. Several optimizers in one batch make one step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        observe_wrapped(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # An earlier fit may have left its hooks, if another callback's `on_exception` raised before this one's.
        self._remove_hooks()
        # Under manual optimization another forward may follow backward; otherwise hooks and schedulers do.
        self._between = "other" if pl_module.automatic_optimization else "forward"
        self._manual_backward_check = ManualBackwardCheck(trainer.strategy.model, pl_module, trainer.optimizers)
        self._steps = StepWatch(trainer, self._on_stepped)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._steps is not None:
            self._steps.begin_batch()
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
        self._end_batch(trainer, batch, self._steps is not None and self._steps.end_batch(trainer))
        self._enter("data")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.validating or trainer.sanity_checking:
            self._enter(None)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._enter("data")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps is not None:
            self._steps.pause()
        self._enter(None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _on_stepped(self) -> None:
        self._enter(self._between)

    def _release(self) -> None:
        self._remove_hooks()
        self._enter(None)

    def _remove_hooks(self) -> None:
        if self._manual_backward_check is not None:
            self._manual_backward_check.close()
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def batch_follows(trainer: Trainer) -> bool:
    """Returns whether the loop fetches a batch next, rather than validate or end."""
    if trainer.fit_loop.epoch_loop.done:
        return False
    return trainer.validating or not is_validation_next(trainer)
