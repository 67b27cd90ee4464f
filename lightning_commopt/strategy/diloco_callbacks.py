"""DecidesTogether: makes callbacks and loops decide the same on all ranks although the ranks' values differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_commopt.compat.clock import decide_on_time
from lightning_commopt.compat.lightning import callbacks_of, clock_callbacks, is_in_hook, reductions_left_out
from lightning_commopt.compat.wrapping import wrap_method
from lightning_commopt.strategy.living_collectives import LivingCollectives
from lightning_commopt.sync.diloco.living import reduced
from lightning_commopt.sync.strategies import trainer_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DecidesTogether(LivingCollectives):
    """The part of a strategy with `Rounds` that makes callbacks and loops decide the same on all ranks.

    Lightning decides some things with a broadcast in every batch. Here they are decided only at the end of a round, so
    that ranks do not wait for each other between exchanges.
    """

    _has_stepped: bool
    _undo_wrapping: tuple[Callable[[], None], ...] = ()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_agreed_on_signal = False
        if self._living is None:
            # With ``overlap`` the exchanges report signals. A meeting before a batch would wait for these exchanges.
            self._guards.agree_on_signals_by(self._meet, self._pop_agreement_on_signal if self._plan.overlap else None)

    def _meet(self, value: bool = False) -> bool:
        """Waits for all ranks and pending exchanges; returns whether ``value`` is true on any rank."""
        assert self.rounds is not None
        return self.rounds.meet(value)

    def _wrap_callbacks(self) -> None:
        """Wraps methods of the Trainer, its validation loop and its callbacks, until `_unwrap_callbacks`."""
        trainer = trainer_of(self)
        undos = [
            wrap_method(callback, "on_train_batch_end", self._call_at_end_of_round)
            for callback in clock_callbacks(trainer)
        ]
        undos.append(decide_on_time(trainer, self._is_validation_due))
        undos.append(wrap_method(trainer.fit_loop.epoch_loop.val_loop, "run", self._call_after_meeting))
        undos.append(wrap_method(trainer, "save_checkpoint", self._save_together))
        for callback in callbacks_of(trainer, "EarlyStopping") if self.world_size > 1 else ():
            evaluate = partial(self._with_common_value, callback.monitor)
            undos.append(wrap_method(callback, "_evaluate_stopping_criteria", evaluate))
        for callback in callbacks_of(trainer, "ModelCheckpoint") if self.world_size > 1 else ():
            # Lightning calls _save_last_checkpoint after _save_topk_checkpoint, with the same dict of values, so the
            # first of them that is called is enough.
            method = "_save_topk_checkpoint" if callback.save_top_k else "_save_last_checkpoint"
            if callback.save_top_k or callback.save_last:
                undos.append(wrap_method(callback, method, self._with_common_values))
        self._undo_wrapping = tuple(undos)

    def _unwrap_callbacks(self) -> None:
        for undo in self._undo_wrapping:
            undo()
        self._undo_wrapping = ()

    @property
    def _is_at_end_of_round(self) -> bool:
        """Whether an optimizer step of this batch was the last of a round.

        It is true in one batch of each round, also where later batches skip their step.
        """
        return self._has_stepped and self.rounds is not None and self.rounds.num_steps % self._plan.sync_every == 0

    def _call_at_end_of_round(self, inner: Callable[..., None], *args: Any) -> None:
        """Calls a hook that broadcasts a decision in every batch, but only at the end of a round."""
        if self._is_at_end_of_round:
            inner(*args)

    def _is_validation_due(self, is_due: bool) -> bool:
        """Returns whether validation by time is due on rank 0; ranks ask rank 0 only at the end of a round."""
        return self._is_at_end_of_round and self.broadcast(is_due)

    def _call_after_meeting(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method in which ranks wait for each other, once all ranks are there."""
        # An exception may have interrupted this rank alone; the others would never meet it.
        if self._living is None and not trainer_of(self).interrupted:
            self._meet()
        return inner(*args, **kwargs)

    def _save_together(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint; in ``on_train_end`` with the mean of the weights that callbacks have set there.

        ModelCheckpoint may save in ``on_train_end``.
        """
        if self.rounds is not None and self.rounds.shows_final and is_in_hook(trainer_of(self), "on_train_end"):
            self.rounds.finish_again()
        self._call_after_meeting(save, *args, **kwargs)

    def _with_common_values(self, save: Callable[..., None], trainer: Trainer, values: dict[str, Tensor]) -> None:
        """Saves a checkpoint whose name, and whose place among the best, come from values that are equal on all ranks.

        A rank with another path would miss the file that rank 0 writes, or remove the files beside another checkpoint.
        """
        if not trainer.interrupted:
            self._call_after_meeting(self._replace_by_common_values, values)
        save(trainer, values)

    def _replace_by_common_values(self, values: dict[str, Tensor]) -> None:
        """Replaces values in place: by their reduction, where the step left it out, else by those of the first rank."""
        own = {name: x.cpu() for name, x in values.items()}
        gathered = self._gather_objects((own, reductions_left_out(trainer_of(self))))
        reductions = {name: op for _, ops in gathered for name, op in ops.items()}
        for name in dict.fromkeys(name for rank_values, _ in gathered for name in rank_values):
            tensors = [rank_values[name] for rank_values, _ in gathered if name in rank_values]
            common = reduced(tensors, reductions[name]) if name in reductions else tensors[0]
            values[name] = common.to(self.root_device)

    def _with_common_value(self, name: str, evaluate: Callable[[Tensor], Any], value: Tensor) -> Any:
        """Evaluates a stopping criterion on a value that is equal on all ranks: reduced, if the step left that out."""
        gathered = self._gather_objects((value.cpu(), reductions_left_out(trainer_of(self)).get(name)))
        if ops := [op for _, op in gathered if op is not None]:
            value = reduced([rank_value for rank_value, _ in gathered], ops[0]).to(value.device)
        return evaluate(value)
