"""FitGuards: watches the ranks of a Trainer's strategy during a fit, and lets them agree on signals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_commopt.compat.clock import decide_on_time
from lightning_commopt.compat.lightning import batches_that_stepped
from lightning_commopt.compat.loops import restore_loaders
from lightning_commopt.compat.sigterm import SigtermCheck, broadcasts_sigterm, is_queued_again
from lightning_commopt.strategy.base import is_fit
from lightning_commopt.strategy.remedies import explain_error
from lightning_commopt.sync.diloco.living import LivingRanks
from lightning_commopt.sync.store import key_space
from lightning_commopt.sync.strategies import WatchedStrategy, trainer_of
from lightning_commopt.text.validation import info, warn_once
from lightning_commopt.watch.fit_watch import FitWatch
from lightning_commopt.watch.own_errors import log_own_errors
from lightning_commopt.watch.patient_watch import PatientWatch
from lightning_commopt.watch.sigterm_notice import SigtermNotice

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class FitGuards:
    """The watch of a fit of several ranks, and their agreement on SIGTERM and on validation by time.

    It works from `start` to `close`. Until `let_ranks_fail` is called, a rank that fails ends the fit of all.

    Args:
        watch: whether fits are watched.
        sigterm_every_n_steps: the user's number of optimizer steps between two agreements on SIGTERM, or None.
        default_every_n_steps: the number if the user has set none, for a strategy that lets its ranks agree on
            validation by time itself; None to keep Lightning's own check for SIGTERM.
    """

    def __init__(
        self, *, watch: bool, sigterm_every_n_steps: int | None, default_every_n_steps: int | None = None
    ) -> None:
        self._watches, self._sigterm_every_n_steps = watch, sigterm_every_n_steps
        self._default_every_n_steps = default_every_n_steps
        self._sigterm_check: SigtermCheck | None = None
        self.fit_watch: FitWatch | PatientWatch | None = None
        self._trainer: Trainer | None = None
        self._undo: list[Callable[[], None]] = []

    def start(self, strategy: WatchedStrategy) -> None:
        """Starts the guards if the strategy is about to fit. All ranks must call it."""
        if is_fit(strategy):
            self._trainer = trainer_of(strategy)
            self.fit_watch = FitWatch(strategy) if self._watches and strategy.world_size > 1 else None
            self._sigterm_check = self._check_sigterm(strategy)
            if strategy.world_size > 1 and self._sigterm_check is None and broadcasts_sigterm(self._trainer):
                notice = SigtermNotice(self._trainer, key_space("sigterm"), dist.get_rank(), strategy.world_size)
                self._undo.append(notice.close)
            if strategy.world_size > 1 and self._default_every_n_steps is None:
                self._undo.append(decide_on_time(self._trainer, self._is_validation_due))

    def _is_validation_due(self, is_due: bool) -> bool:
        """Returns whether validation by time is due on rank 0; ranks ask rank 0 as often as they agree on SIGTERM."""
        assert self._trainer is not None
        if batches_that_stepped(self._trainer) % (self._sigterm_every_n_steps or 1):
            return False
        flag = torch.tensor([is_due], dtype=torch.int32, device=self._trainer.strategy.root_device)
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def _check_sigterm(self, strategy: WatchedStrategy) -> SigtermCheck | None:
        """Replaces Lightning's check for SIGTERM in a fit of several ranks; returns None if Lightning's is kept."""
        trainer, option = trainer_of(strategy), f"sigterm_every_n_steps={self._sigterm_every_n_steps}"
        every_n_steps = self._sigterm_every_n_steps or self._default_every_n_steps
        if every_n_steps is None and is_queued_again(trainer) and strategy.uneven_batches != "allow":
            every_n_steps = 1  # Lightning's broadcasts, which this replaces, are as frequent
        if every_n_steps is None:
            return None
        if strategy.world_size == 1:
            if self._sigterm_every_n_steps is not None:
                info(f"{option} has no effect: there is only one process.")
            return None
        if not broadcasts_sigterm(trainer):
            if self._sigterm_every_n_steps is not None:
                warn_once(
                    f"{option} has no effect: this version of Lightning does not broadcast SIGTERM between batches, as"
                    " versions from 2.5.2 on do."
                )
            return None
        return SigtermCheck(trainer, every_n_steps)

    def let_ranks_fail(self, strategy: WatchedStrategy, living: LivingRanks, is_ending: Callable[[], bool]) -> None:
        """Lets the fit continue without ranks that fail from now on. All ranks must call it.

        Args:
            strategy: the strategy that was passed to `start`.
            living: the ranks that take part.
            is_ending: returns whether the exchanges before this batch have reported SIGTERM; the result is the same on
                all ranks that took part in them.
        """
        if self.fit_watch is not None:
            self.fit_watch.close()
        self.fit_watch = PatientWatch(strategy, living, compares=self._watches)
        if self._sigterm_check is not None:
            self._sigterm_check.agree_by(
                lambda has_received: any(living.objects(has_received, "agreeing on SIGTERM").values()),
                is_ending,
                is_of_all=False,
            )

    def agree_on_change(self, names: Sequence[str]) -> None:
        """Raises if parameters have changed on some ranks only; see `FitWatch.agree_on_change`."""
        if isinstance(self.fit_watch, FitWatch):
            self.fit_watch.agree_on_change(names)

    def agree_on_signals_by(
        self, any_rank: Callable[[bool], bool], before_batch: Callable[[], bool] | None = None
    ) -> None:
        """Replaces the collectives by which the ranks agree on signals; see `SigtermCheck.agree_by`.

        With ``before_batch`` it replaces nothing if the user has set ``sigterm_every_n_steps``.
        """
        keeps_users_choice = before_batch is not None and self._sigterm_every_n_steps is not None
        if self._sigterm_check is not None and not keeps_users_choice:
            self._sigterm_check.agree_by(any_rank, before_batch)

    @property
    def has_signal(self) -> bool:
        """Whether this rank has received a signal that the ranks have not agreed on yet."""
        return self._sigterm_check is not None and self._sigterm_check.has_signal

    def fail(self, exception: BaseException) -> None:
        """Explains an exception that ends the fit, and reports it to the other ranks."""
        with log_own_errors("The watch of a fit"):
            explain_error(exception)
            if self.fit_watch is not None:
                self.fit_watch.fail(exception)

    @property
    def fails_alone(self) -> bool:
        """Whether this rank has raised while other ranks go on; see `FitWatch.fails_alone`."""
        return isinstance(self.fit_watch, FitWatch) and self.fit_watch.fails_alone

    def close(self) -> None:
        for guard in (self._sigterm_check, self.fit_watch):
            if guard is not None:
                guard.close()
        while self._undo:
            self._undo.pop()()
        if self._trainer is not None:
            restore_loaders(self._trainer)
        self._sigterm_check = self.fit_watch = self._trainer = None
