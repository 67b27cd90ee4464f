"""DecidesTogether: callbacks and loops that decide, or set weights, where ranks have values of their own."""

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
    """The part of a strategy with `Rounds` that makes callbacks and loops decide the same on all ranks, and seldom."""

    _has_stepped: bool
    _wrapped_callbacks: tuple[Callable[[], None], ...] = ()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_agreed_on_signal = False
        if self._living is None:
            # With ``overlap`` the exchanges bring word of one, which a meeting before a batch would wait for.
            self._guards.agree_on_signals_by(self._meet, self._take_agreement if self._plan.overlap else None)

    def _meet(self, value: bool = False) -> bool:
        assert self.rounds is not None
        return self.rounds.meet(value)

    def _wrap_callbacks(self) -> None:
        """Wraps the callbacks of a fit, and its validation, until `_unwrap_callbacks`."""
        trainer = trainer_of(self)
        wrapped = [wrap_method(of, "on_train_batch_end", self._after_rounds) for of in clock_callbacks(trainer)]
        wrapped.append(decide_on_time(trainer, self._is_time))
        wrapped.append(wrap_method(trainer.fit_loop.epoch_loop.val_loop, "run", self._after_meeting))
        wrapped.append(wrap_method(trainer, "save_checkpoint", self._save_together))
        for callback in callbacks_of(trainer, "EarlyStopping") if self.world_size > 1 else ():
            around = partial(self._with_common_value, callback.monitor)
            wrapped.append(wrap_method(callback, "_evaluate_stopping_criteria", around))
        for callback in callbacks_of(trainer, "ModelCheckpoint") if self.world_size > 1 else ():
            # Lightning calls the second after the first, with the same values.
            saves = "_save_topk_checkpoint" if callback.save_top_k else "_save_last_checkpoint"
            if callback.save_top_k or callback.save_last:
                wrapped.append(wrap_method(callback, saves, self._with_common_values))
        self._wrapped_callbacks = tuple(wrapped)

    def _unwrap_callbacks(self) -> None:
        for undo in self._wrapped_callbacks:
            undo()
        self._wrapped_callbacks = ()

    @property
    def _has_whole_rounds(self) -> bool:
        """Whether the step of this batch was the last of a round, once each round also where a step is left out."""
        return self._has_stepped and self.rounds is not None and self.rounds.num_steps % self._plan.sync_every == 0

    def _after_rounds(self, inner: Callable[..., None], *args: Any) -> None:
        """Calls what broadcasts a decision in every batch only after whole rounds."""
        if self._has_whole_rounds:
            inner(*args)

    def _is_time(self, is_over: bool) -> bool:
        """Returns whether the time until a validation is over on rank 0; ranks ask it only after whole rounds."""
        return self._has_whole_rounds and self.broadcast(is_over)

    def _after_meeting(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._living is None and not trainer_of(self).interrupted:  # perhaps only this rank is
            self._meet()
        return inner(*args, **kwargs)

    def _save_together(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Saves a checkpoint; in ``on_train_end``, as ModelCheckpoint may, with the mean of what callbacks have set."""
        if self.rounds is not None and self.rounds.shows_final and is_in_hook(trainer_of(self), "on_train_end"):
            self.rounds.finish_again()
        self._after_meeting(save, *args, **kwargs)

    def _with_common_values(self, save: Callable[..., None], trainer: Trainer, values: dict[str, Tensor]) -> None:
        """Saves a checkpoint whose name and rank among the best come from values that all ranks have.

        A rank with another path would not find the file, which rank 0 writes, or remove what ranks keep beside another.
        """
        if not trainer.interrupted:
            self._after_meeting(self._make_common, values)
        save(trainer, values)

    def _make_common(self, values: dict[str, Tensor]) -> None:
        own = {name: x.cpu() for name, x in values.items()}
        ranks = self._objects_of_ranks((own, reductions_left_out(trainer_of(self))))
        reductions = {name: op for _, of_rank in ranks for name, op in of_rank.items()}
        for name in dict.fromkeys(name for of_rank, _ in ranks for name in of_rank):
            same = [of_rank[name] for of_rank, _ in ranks if name in of_rank]
            common = reduced(same, reductions[name]) if name in reductions else same[0]
            values[name] = common.to(self.root_device)

    def _with_common_value(self, name: str, evaluate: Callable[[Tensor], Any], value: Tensor) -> Any:
        """Decides whether to stop from a value that all ranks have, where a step has left its reduction out."""
        ranks = self._objects_of_ranks((value.cpu(), reductions_left_out(trainer_of(self)).get(name)))
        if ops := [op for _, op in ranks if op is not None]:
            value = reduced([of_rank for of_rank, _ in ranks], ops[0]).to(value.device)
        return evaluate(value)
