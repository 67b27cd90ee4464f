"""FitWatch: keeps the ranks of a fit from waiting for a rank that has failed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch.distributed as dist

from lightning_commopt.compat.loops import LoopEvents, batch_is_open, may_end_now, num_begun, num_completed
from lightning_commopt.launch.environment import launcher_pid
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.sync.store import key_space
from lightning_commopt.sync.strategies import WatchedStrategy, trainer_of
from lightning_commopt.watch import times
from lightning_commopt.watch.changed_parameters import ChangedParameters, Place
from lightning_commopt.watch.epoch_ends import EpochEnds
from lightning_commopt.watch.lifelines import Lifelines
from lightning_commopt.watch.own_errors import log_own_errors
from lightning_commopt.watch.peers import Failure, Peers
from lightning_commopt.watch.uneven_batches import (
    RESIZING,
    SKIPPED,
    STOPPED,
    UnevenBatchesError,
    make_even,
)
from lightning_commopt.watch.waiting import (
    end_waiting_rank,
    handles_exception_alone,
    is_in_backward,
    is_in_callback,
    is_in_collective,
    print_now,
    waits_for_others,
)

_of_failed_fits: list[Lifelines] = []
"""Connections that stay open until this process ends, or until its next fit has failed, too."""


class FitWatch:
    """Compares the ranks' numbers of batches, and ends a rank that waits for one that has failed.

    It owns a thread, a part of the store, and the connections to other nodes. The thread checks once a second whether
    training has progressed, and reads the store only if it has not. A rank that waits for a failed one gets some
    seconds to notice and to end by itself; then its process is ended. A rank that waits for nobody is never ended, and
    none is ended while one that has raised saves a checkpoint, for example: launchers end all ranks after the first.

    All ranks must create it, once for each fit, when there is a process group.
    """

    def __init__(self, strategy: WatchedStrategy) -> None:
        trainer = self._trainer = trainer_of(strategy)
        assert strategy.cluster_environment is not None
        self._policy = strategy.uneven_batches
        self._device = strategy.root_device
        self._launcher = launcher_pid(strategy.start_method)
        self._grace_s = getattr(strategy.launcher, "grace_s", None) or times.FIT_GRACE_S
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        ranks_per_node, timeout = strategy.num_processes, strategy.timeout
        store = key_space("fit")
        first = self._rank - self._rank % ranks_per_node
        first_ranks, address = range(0, self._world_size, ranks_per_node), strategy.cluster_environment.main_address
        self._lifelines = Lifelines(store, self._rank, first_ranks, address)
        ranks_here = range(first, first + ranks_per_node)
        self._peers = Peers(store, self._rank, self._world_size, ranks_here, self._lifelines, self._may_be_over)
        common = store, self._rank, self._world_size, timeout.total_seconds()
        self._ends = EpochEnds(*common, partial(self._check_peers, "at the end of an epoch"))
        self._changes = ChangedParameters(*common, partial(self._check_peers, "before parameters change"))
        self._agreed: int | None = None
        self._explanation: str | None = None
        self._fit_thread = threading.get_ident()
        self._events = LoopEvents(
            trainer,
            on_data=self._make_even,
            on_epoch_start=lambda: self._ends.begin(trainer.current_epoch),
            on_next_batch=lambda: self._ends.advance(num_begun(trainer)),
            on_epoch_end=self._leave_epoch,
            on_error=self.fail,
            resizes=self._policy in RESIZING,
        )
        self._stop, self._is_closed = threading.Event(), threading.Event()
        self._thread = self._start(self._run)

    def fail(self, exception: BaseException) -> None:
        """Reports this rank's failure to the others, or explains an error that follows from another's failure."""
        if self._stop.is_set():
            return
        self._stop_watching()
        self._peers.leave_by_exception()
        self._thread = self._start(self._follow_exception)
        if isinstance(exception, RuntimeError) and not isinstance(exception, UnevenBatchesError):
            failure = None if self._explanation else self._peers.failure_soon()
            cause = self._explanation if failure is None else failure.text
            if cause is not None:
                if exception.args and isinstance(exception.args[0], str):
                    exception.args = (f"{exception.args[0]}\n{cause}", *exception.args[1:])
                return
        text = self._peers.fail(exception)
        if text is not None and multiprocessing.parent_process() is not None:
            print_now(text)  # printed now, because the parent prints it only when all ranks have ended

    @cached_property
    def fails_alone(self) -> bool:
        """Whether this rank has raised, and ranks that its checkpoint would wait for go on; the same on all that raise.

        Rank 0 writes the checkpoint, for which the others wait; so they wait for rank 0 alone to raise, too.
        """
        others = range(1, self._world_size) if self._rank == 0 else [0]
        return self._stop.is_set() and not self._peers.raise_together(others)

    def agree_on_change(self, names: Sequence[str]) -> None:
        """Must be called if the model has changed, before a batch begins; see `ChangedParameters.agree`."""
        self._changes.agree(_place(self._position), names)

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop_watching()
            self._find_early_rank()
            self._peers.finish()
            self._lifelines.close()
        else:
            self._is_closed.set()
            self._join()
            self._peers.set_busy(False)
            # The program may catch the exception on all ranks, which would take the end of a connection for a death.
            while _of_failed_fits:
                _of_failed_fits.pop().close()
            _of_failed_fits.append(self._lifelines)
        self._events.close()

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="commopt-fit-watch", daemon=True)
        thread.start()
        return thread

    def _stop_watching(self) -> None:
        self._stop.set()
        self._join()

    def _join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=times.STALLED_S)

    def _follow_exception(self) -> None:
        """Writes to the store, until `close`, whether this rank does something that the others should wait for."""
        with log_own_errors("The watch of a fit"):
            while not self._is_closed.wait(times.FIT_LOOK_S):
                self._peers.set_busy(handles_exception_alone(self._fit_thread, self._device))

    def _make_even(self) -> None:
        self._agreed = make_even(
            self._trainer, self._policy, self._rank, lambda number: dict(enumerate(values_of_all_ranks(number)))
        )
        self._peers.learn()  # all have written: Lightning's collectives for dataloaders follow

    def _leave_epoch(self) -> None:
        number = num_begun(self._trainer)
        # Lightning leaves one batch open that it skips. A loop of the program's own may complete none at all.
        is_skipped = num_completed(self._trainer) == number - 1
        number -= is_skipped
        agreed = number if self._policy == "allow" else self._agreed
        self._ends.leave(number, agreed, SKIPPED if is_skipped else STOPPED if self._trainer.should_stop else "")

    def _check_peers(self, place_text: str) -> None:
        failure = self._peers.failure()
        if failure is not None and not self._peers.is_one_busy():
            raise RuntimeError(f"Rank {self._rank} waits {place_text}, but another rank has failed. {failure.text}")

    def _run(self) -> None:
        with log_own_errors("The watch of a fit"):
            try:
                self._watch()
            except Exception:
                self._peers.set_waiting(False)  # without this watch, the others must not regard this rank as idle
                raise

    def _watch(self) -> None:
        position, moved_at = self._position, time.monotonic()
        in_vain_since: float | None = None
        while not self._stop.wait(times.FIT_LOOK_S):
            now, before, position = time.monotonic(), position, self._position
            if position != before:
                moved_at = now
            self._peers.learn()
            self._lifelines.update()
            has_stalled = now - moved_at >= times.STALLED_S
            reason = self._reason_to_end(position) if has_stalled else None
            if not has_stalled:
                self._peers.set_waiting(False)
            in_vain_since = None if reason is None else in_vain_since or now
            is_over = in_vain_since is not None and now - in_vain_since >= self._grace_s
            if reason is not None and is_over and not self._stop.is_set():
                end_waiting_rank(self._rank, reason, self._grace_s)

    def _reason_to_end(self, position: tuple[int, int, int]) -> str | None:
        """Returns why this stalled rank waits for one that cannot come; None if it does not, or if that is unknown."""
        place = _place(position), batch_is_open(self._trainer)
        self._peers.query_store(lambda: self._changes.notify_waiting_ranks(*place), None)
        self._find_early_rank()
        failure = self._peers.failure()
        if failure is None and self._launcher not in (None, os.getppid()):
            failure = Failure(self._rank, has_died=True, text="The process that started this rank has ended.")
        if failure is None:
            return None
        thread = self._fit_thread
        is_waiting = is_in_collective(thread) if self._may_be_over() else waits_for_others(thread, self._device)
        self._peers.set_waiting(is_waiting)
        if failure.has_died or self._peers.has_died():
            # What this rank does on its own must not be lost, and a last batch may not need the others any more.
            is_lost = self._ends.is_in_epoch and not may_end_now(self._trainer) and not is_in_callback(thread)
            return failure.text if is_waiting or is_lost else None
        # All ranks may raise and catch the same exception. Then they wait for a slow one, not for one that has raised.
        is_in_vain = is_waiting and self._peers.are_all_idle() and not self._peers.is_one_busy()
        return failure.text if is_in_vain else None

    def _may_be_over(self) -> bool:
        """Returns whether this rank can end the fit without the others, so that these may have ended it before."""
        return may_end_now(self._trainer) and not batch_is_open(self._trainer) and not self._ends.is_meeting

    @property
    def _position(self) -> tuple[int, int, int]:
        return *self._ends.position, num_begun(self._trainer)

    def _find_early_rank(self) -> None:
        if self._explanation is None:
            thread = self._fit_thread
            is_waiting = is_in_collective(thread)
            is_training = batch_is_open(self._trainer) and (is_waiting or is_in_backward(thread))
            progress = num_begun(self._trainer), is_waiting, is_training
            self._explanation = self._peers.query_store(lambda: self._ends.find_early_rank(*progress), None)
            if self._explanation is not None:
                print_now(f"[rank {self._rank}] {self._explanation}")


def _place(position: tuple[int, int, int]) -> Place:
    """Returns the epoch and the batches that this rank has begun in it."""
    return position[0], position[2]
