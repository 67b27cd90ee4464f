"""StepWatch: detects whether a training batch has made an optimizer step, also one that the Trainer does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class StepWatch:
    """Watches the optimizers of a fit, from the start of training until `close`.

    The Trainer does not count steps that a program takes with ``optimizers(use_pl_optimizer=False)``, nor steps of an
    optimizer within another one, as in sharpness-aware minimization. If it has no optimizer with parameters, the
    program has its own, and each batch counts as a step.

    Args:
        trainer: the Trainer, at the start of training.
        on_step: called after each step of one of the Trainer's optimizers within a batch.
    """

    def __init__(self, trainer: Trainer, on_step: Callable[[], None] | None = None) -> None:
        self._on_step = on_step
        self._global_step = trainer.global_step
        self._has_stepped = False
        self._is_in_batches = False
        self._optimizers = tuple(trainer.optimizers)
        parameters = [x for own in self._optimizers for group in own.param_groups for x in group["params"]]
        self._has_optimizers = any(is_lazy(x) or x.numel() for x in parameters)
        self._trained = {id(x) for x in parameters}
        self._handle = register_optimizer_step_post_hook(self._note_step)

    def begin_batch(self) -> None:
        """Must be called when a batch begins."""
        self._is_in_batches = True

    def end_batch(self, trainer: Trainer) -> bool:
        """Must be called when a batch has ended; returns whether it has made a step, by one optimizer or several."""
        before, self._global_step = self._global_step, trainer.global_step
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped or self._global_step > before or not self._has_optimizers

    def pause(self) -> None:
        """Ignores steps until the next batch, such as those of a LearningRateFinder at the start of an epoch."""
        self._is_in_batches = False

    def close(self) -> None:
        """Ends the watch."""
        self._handle.remove()

    def _note_step(self, optimizer: Optimizer, *args: Any) -> None:
        if not self._is_in_batches:
            return
        if any(optimizer is own for own in self._optimizers):
            self._has_stepped = True
            if self._on_step is not None:
                self._on_step()
        elif any(id(x) in self._trained for group in optimizer.param_groups for x in group["params"]):
            self._has_stepped = True
