"""What Lightning does on SIGTERM, and on SLURM's signal to queue a job again; see `lightning_commopt.compat`.

Lightning 2.5.2 and later broadcast a flag from rank 0 before every batch and wait for it on the host; the signal's
handler broadcasts too, wherever training is. The handler of SLURM's signal saves a checkpoint there. This module
replaces ``_broadcast_sigterm_tensor`` and ``run`` of the epoch loop, ``run`` of its validation loop, and
``_sigterm_notifier_fn`` and ``_slurm_sigusr_handler_fn`` of the signal connector, and sets the connector's
``received_sigterm``. These names are the same in ``lightning`` and ``pytorch_lightning``; this module imports neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero

from lightning_commopt.compat.hooks import SIGTERM_BROADCAST
from lightning_commopt.compat.lightning import batches_that_stepped, package_of
from lightning_commopt.compat.wrapping import wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def broadcasts_sigterm(trainer: Trainer) -> bool:
    """Returns whether this Lightning broadcasts SIGTERM before every batch."""
    return hasattr(trainer.fit_loop.epoch_loop, SIGTERM_BROADCAST)


def is_queued_again(trainer: Trainer) -> bool:
    """Returns whether Lightning saves a checkpoint and queues the job again when SLURM sends a signal."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return bool(getattr(environment, "auto_requeue", False))


def around_broadcasts(trainer: Trainer, around: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Calls ``around(broadcast)`` instead of Lightning's broadcast, if there is one; returns a function to undo it."""
    if not broadcasts_sigterm(trainer):
        return lambda: None
    return wrap_method(trainer.fit_loop.epoch_loop, SIGTERM_BROADCAST, around)


def around_broadcast_calls(trainer: Trainer, around: Callable[..., Any]) -> Callable[[], None]:
    """Calls ``around(dist.broadcast, tensor, ...)`` instead of the function within Lightning's broadcast.

    Unlike `around_broadcasts`, this has no effect if `SigtermCheck` replaces the broadcast. It returns a function to
    undo it.
    """

    def replaced(inner: Callable[[], None]) -> None:
        broadcast = dist.broadcast
        dist.broadcast = partial(around, broadcast)
        try:
            inner()
        finally:
            dist.broadcast = broadcast

    return around_broadcasts(trainer, replaced)


def report_lost_broadcasts(trainer: Trainer, report: Callable[[Exception], None]) -> Callable[[], None]:
    """Reports exceptions of the broadcast that Lightning ignores, such as timeouts; returns a function to undo it."""

    def reporting(broadcast: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return broadcast(*args, **kwargs)
        except Exception as error:
            report(error)
            raise

    return around_broadcast_calls(trainer, reporting)


def on_sigterm(trainer: Trainer, receive: Callable[[], None]) -> Callable[[], None]:
    """Calls a function on SIGTERM in place of Lightning's handler; returns a function to undo it.

    As Lightning does, this logs the signal and passes it on to the ranks that this one has started. It must be called
    before Lightning registers its handlers.
    """

    def handle(inner: Callable[..., None], number: int, frame: FrameType | None) -> None:
        rank_zero.log.info(rank_zero.rank_prefixed_message(f"Received SIGTERM: {number}", trainer.local_rank))
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        receive()

    return wrap_method(trainer._signal_connector, "_sigterm_notifier_fn", handle)


def note_sigterm(trainer: Trainer) -> None:
    """Tells Lightning of a SIGTERM: a validation ends after its batch, and the next broadcast of rank 0 tells all."""
    trainer._signal_connector.received_sigterm = True


def raise_sigterm(trainer: Trainer) -> NoReturn:
    """Ends a fit as Lightning does on SIGTERM."""
    note_sigterm(trainer)
    raise import_module(f"{package_of(trainer)}.utilities.exceptions").SIGTERMException


def around_validations(trainer: Trainer, around: Callable[..., Any]) -> Callable[[], None]:
    """Calls ``around(run, ...)`` instead of a fit's validations; returns a function to undo it."""
    return wrap_method(trainer.fit_loop.epoch_loop.val_loop, "run", around)


def run_whatever_handlers_raise(end: Callable[[], None]) -> None:
    """Runs a function to its end while a fit ends with an exception, even if a handler of a signal raises meanwhile.

    Launchers send SIGTERM to all other ranks when one has failed, and Lightning's handler broadcasts, which raises once
    the others have ended: wherever the main thread is by then. Python runs handlers in the main thread only, so the
    function runs in another. What a handler raises is dropped, as the fit already ends with an exception; but not
    KeyboardInterrupt or SystemExit, which do not wait for the function either.
    """
    has_begun, has_ended = threading.Lock(), threading.Event()

    def once() -> None:
        if has_begun.acquire(blocking=False):
            try:
                end()
            finally:
                has_ended.set()

    try:
        threading.Thread(target=once, name="commopt-end").start()
    except Exception:  # this host allows no more threads, or a handler has raised already
        once()
    while True:
        with suppress(Exception):
            has_ended.wait()  # a Thread.join that was interrupted once would regard the thread as ended
            return


class SigtermCheck:
    """Makes the ranks agree on signals before every n-th optimizer step, and on SIGTERM at the end of an epoch.

    A signal only sets a flag. When any rank has received SIGTERM, all ranks raise Lightning's ``SIGTERMException``
    before the same batch. When any has received SLURM's signal to queue the job again, all call Lightning's handler
    before the same batch, or before a validation; within one it is called at once. The handler saves a checkpoint and
    waits for all ranks: for ever if some of them are in the collectives of a batch.

    All ranks must create it, for the same fit, with a Lightning that `broadcasts_sigterm`. It lasts until `close`.
    """

    def __init__(self, trainer: Trainer, every_n_steps: int) -> None:
        self._trainer, self._every_n_steps = trainer, every_n_steps
        self._has_received = False
        # SLURM's signals that this rank has received, and those that all ranks have handled, some before it came here.
        self._num_received = self._num_handled = 0
        self._agree_before_batch: Callable[[], bool] | None = None
        self._any_rank: Callable[[bool], bool] = self._any_of_group
        self._is_of_all = True
        self._checked_step = -1
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self._save_and_queue: Callable[..., None] = connector._slurm_sigusr_handler_fn
        self._undo = [
            wrap_method(loop, SIGTERM_BROADCAST, self._before_batch),
            wrap_method(loop, "run", self._run_epoch),
            around_validations(trainer, self._run_validation),
            on_sigterm(trainer, self._receive_sigterm),
            wrap_method(connector, "_slurm_sigusr_handler_fn", self._receive_slurm_signal),
        ]

    def agree_by(
        self,
        any_rank: Callable[[bool], bool],
        before_batch: Callable[[], bool] | None = None,
        *,
        is_of_all: bool = True,
    ) -> None:
        """Replaces the collectives by which the ranks agree.

        Args:
            any_rank: called with whether this rank has received a signal; returns whether any rank has.
            before_batch: called before every batch in place of ``any_rank``; returns whether the ranks have agreed that
                any has received a signal, and false in the next batches.
            is_of_all: whether all ranks agree before the same batch. If not, SLURM's signal is handled at once, as
                Lightning does, and ``before_batch`` is about SIGTERM.
        """
        self._agree_before_batch, self._any_rank, self._is_of_all = before_batch, any_rank, is_of_all

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _receive_sigterm(self) -> None:
        self._has_received = True

    def _receive_slurm_signal(self, inner: Callable[..., None], number: int, frame: FrameType | None) -> None:
        self._num_received += 1
        if not (self._trainer.training and self._is_of_all):
            self._handle_if(self._must_save)

    def _before_batch(self, inner: Callable[[], None]) -> None:
        if not self._is_of_all:
            assert self._agree_before_batch is not None
            if self._agree_before_batch():
                raise_sigterm(self._trainer)
        elif self._have_agreed():
            self._handle_if(self._any_rank(self._must_save))
            if self._agree():
                raise_sigterm(self._trainer)

    def _have_agreed(self) -> bool:
        """Returns whether the ranks agree, before this batch, that any has received a signal."""
        if self._agree_before_batch is not None:
            return self._agree_before_batch()
        step = batches_that_stepped(self._trainer)
        if step % self._every_n_steps or step == self._checked_step:
            return False
        self._checked_step = step
        return self._any_rank(self.has_signal)

    @property
    def has_signal(self) -> bool:
        """Whether this rank has received a signal that not all have handled, and on which ranks agree."""
        return self._has_received or (self._is_of_all and self._must_save)

    @property
    def _must_save(self) -> bool:
        return self._num_received > self._num_handled

    def _handle_if(self, must_save: bool) -> None:
        if must_save:
            self._num_handled += 1
            strategy: Any = self._trainer.strategy
            self._save_and_queue(strategy.cluster_environment.requeue_signal, None)

    def _run_epoch(self, inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        self._agree()  # Lightning raises the exception itself when it has ended the epoch

    def _run_validation(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Ranks that have begun it before the signal save within it, and wait for this one.
        self._handle_if(self._must_save)
        return inner(*args, **kwargs)

    def _agree(self) -> bool:
        """Tells Lightning on this rank if any rank has received SIGTERM; returns whether Lightning knows of one."""
        if self._any_rank(self._has_received):
            note_sigterm(self._trainer)
        return self._trainer.received_sigterm

    def _any_of_group(self, has_signal: bool) -> bool:
        flag = torch.tensor([has_signal], dtype=torch.int32, device=self._trainer.strategy.root_device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())
