"""FitWatch: what guards a fit on several ranks against waiting for a rank that does not come."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_commopt.compat.loops import LoopEvents, num_begun
from lightning_commopt.compat.torch import default_store
from lightning_commopt.watch.epoch_ends import EpochEnds
from lightning_commopt.watch.peers import Peers
from lightning_commopt.watch.uneven_batches import UnevenBatchesError, make_even

_WAKE_S = 1.0
_STALLED_S = 2.0
_GRACE_S = 5.0

# By the default group, whose store must not see a fit's keys twice.
_fits: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class FitWatch:
    """Compares the ranks' numbers of batches, and ends a rank that waits for one that has failed.

    A thread wakes once a second and compares where the training is with where it was. Only where it has not moved does
    it ask the store. A rank that has failed is waited for in vain: what waits for it gets some seconds to find out by
    itself and to end in an orderly way, then its process ends.

    All ranks must make it, once for each fit.

    Args:
        trainer: about to fit.
        uneven_batches: one of `lightning_commopt.watch.uneven_batches.POLICIES`.
        device: whose tensors the default group can gather.
        ranks_here: the ranks on this host.
        launcher_pid: the process that has started this one and waits for it; None if there is no such one.
        timeout: how long ranks wait for others at the end of an epoch.
    """

    def __init__(
        self,
        trainer: Any,
        uneven_batches: str,
        device: torch.device,
        *,
        ranks_here: Sequence[int],
        launcher_pid: int | None,
        timeout: timedelta,
    ) -> None:
        self._trainer = trainer
        self._policy = uneven_batches
        self._device = device
        self._rank = dist.get_rank()
        store = _store_of_fit()
        self._peers = Peers(store, self._rank, ranks_here)
        self._ends = EpochEnds(store, self._rank, dist.get_world_size(), timeout.total_seconds(), self._check_peers)
        self._agreed: int | None = None
        self._explanation: str | None = None
        self._fit_thread = threading.get_ident()
        self._launcher = launcher_pid
        self._events = LoopEvents(
            trainer,
            on_data=self._make_even,
            on_epoch_start=lambda: self._ends.begin(trainer.current_epoch),
            on_going_on=lambda: self._ends.go_on(num_begun(trainer)),
            on_epoch_end=self._leave_epoch,
            on_error=self.fail,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="commopt-fit-watch", daemon=True)
        self._thread.start()

    def fail(self, exception: BaseException) -> None:
        """This rank has failed: tells the others, or explains an error that comes of another's failure."""
        if self._stop.is_set():
            return
        self._stop_watching()
        if isinstance(exception, RuntimeError) and not isinstance(exception, UnevenBatchesError):
            cause = self._explanation or self._peers.failure_soon()
            if cause is not None:
                if exception.args and isinstance(exception.args[0], str):
                    exception.args = (f"{exception.args[0]}\n{cause}", *exception.args[1:])
                return
        text = self._peers.fail(exception)
        if text is not None and multiprocessing.parent_process() is not None:
            _say(text)  # the parent shows it only when all ranks have ended

    def close(self) -> None:
        """Ends the watch, at the end of a fit."""
        if not self._stop.is_set():
            self._stop_watching()
            self._find_leaver()
            self._peers.finish()
        self._events.close()

    def _stop_watching(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_STALLED_S)

    def _make_even(self) -> None:
        self._agreed = make_even(self._trainer, self._policy, self._device)
        self._peers.learn()  # all have said who they are: Lightning's collectives for dataloaders come after that

    def _leave_epoch(self) -> None:
        number = num_begun(self._trainer)
        self._ends.leave(number, number if self._policy == "allow" else self._agreed)

    def _check_peers(self) -> None:
        failure = self._peers.failure()
        if failure is not None:
            raise RuntimeError(f"Rank {self._rank} waits at the end of an epoch for ranks that do not come. {failure}")

    def _watch(self) -> None:
        position, moved_at = self._position, time.monotonic()
        ends_since: float | None = None
        while not self._stop.wait(_WAKE_S):
            now, before, position = time.monotonic(), position, self._position
            if position != before:
                moved_at = now
            has_stalled = now - moved_at >= _STALLED_S
            reason = self._reason_to_end(has_stalled)
            ends_since = None if reason is None else ends_since or now
            if reason is not None and ends_since is not None and now - ends_since >= _GRACE_S:
                self._end_process(reason)

    def _reason_to_end(self, has_stalled: bool) -> str | None:
        if self._launcher not in (None, os.getppid()):
            return "The process that started this rank has gone."
        self._peers.learn()
        if not has_stalled:
            return None
        self._find_leaver()
        if self._peers.failure() is None:
            return None
        # One that has raised may yet be caught, and what this rank does alone may be worth its time.
        is_in_vain = self._is_in_collective() or (self._ends.is_in_epoch and self._peers.some_died())
        return self._peers.failure() if is_in_vain else None

    @property
    def _position(self) -> tuple[int, int, int]:
        return *self._ends.position, num_begun(self._trainer)

    def _find_leaver(self) -> None:
        if self._explanation is None:
            where = num_begun(self._trainer), self._is_in_collective()
            self._explanation = self._peers.ask(lambda: self._ends.find_leaver(*where), None)
            if self._explanation is not None:
                _say(f"[rank {self._rank}] {self._explanation}")

    def _is_in_collective(self) -> bool:
        """Returns whether the thread that trains is in a function of torch's distributed package."""
        frame = sys._current_frames().get(self._fit_thread)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
                return True
            frame = frame.f_back
        return False

    def _end_process(self, reason: str) -> None:
        if not self._stop.is_set():
            _say(
                f"[rank {self._rank}] {reason}\n[rank {self._rank}] This rank has waited for {_GRACE_S:g} s, and ends."
            )
            os._exit(1)


def _store_of_fit() -> dist.Store:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    number = next(_fits.setdefault(world, itertools.count()))
    return dist.PrefixStore(f"commopt/fit/{number}", default_store())


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
