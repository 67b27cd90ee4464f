"""Peers: detects that another rank has failed, without a message from that rank."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from lightning_commopt.sync.store import poll
from lightning_commopt.text.formatting import escape_controls, text_of
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.process import process_fields
from lightning_commopt.watch.lifelines import Lifelines

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_T = TypeVar("_T")

ORDERLY = ("SIGTERMException", "_TunerExitException")
"""Names of Lightning's exceptions that end a fit on all ranks as intended."""

_NUM_IDLE, _NUM_BUSY, _DIED = "num_idle", "num_busy", "died"
_ENDING = "ending"


class Failure(NamedTuple):
    """A rank that takes part in no further collective."""

    rank: int  # the first rank to fail, as far as known
    has_died: bool  # whether its process has ended; otherwise it has raised, which it may still catch
    text: str  # explains it in one or more lines


class Peers:
    """Which ranks of a fit have failed.

    A rank that raises writes its failure to the store. If a rank was killed, or called ``os._exit``, the ranks on the
    same host notice that its process has ended before the fit, and write the failure. `Lifelines` show other hosts the
    end of a host's first rank.

    ``store`` is the part of the store for this fit, ``ranks_here`` are the ranks of this host, and ``may_be_over``
    returns whether other ranks may have ended the fit while this one has not.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        ranks_here: Sequence[int],
        lifelines: Lifelines,
        may_be_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._others_here = [other for other in ranks_here if other != rank]
        self._lifelines = lifelines
        self._may_be_over = may_be_over
        self._processes: dict[int, str] = {}
        self._failure: Failure | None = None
        self._is_store_lost = False
        self._is_waiting = self._has_left = self._is_busy = False
        store.set(f"process/{rank}", _process_name(os.getpid()) or "")

    def query_store(self, fn: Callable[[], _T], default: _T) -> _T:
        """Returns what a function reads from the store; ``default`` once the store is lost.

        The store ends with the process of rank 0, except under torchrun, whose agent hosts it.
        """
        if not self._is_store_lost and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._is_store_lost = _is_gone(self._processes.get(0, ""))
        if not self._is_store_lost:
            try:
                return fn()
            except RuntimeError:  # the store is not used again, because torch logs a page each time
                self._is_store_lost = True
        return default

    def learn(self) -> None:
        """Reads the process names of the other ranks of this host; cheap once all are known."""
        for rank in self._others_here:
            if rank not in self._processes and (process := self._get(f"process/{rank}")) is not None:
                self._processes[rank] = process

    def fail(self, exception: BaseException) -> str | None:
        """Writes to the store that this rank has failed, unless another rank, as the cause, did so before.

        Returns:
            The text, with the traceback; None if nothing was written, or after Ctrl-C.
        """
        if type(exception).__name__ in ORDERLY:
            return None
        if isinstance(exception, Exception):
            lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
            text = f"Rank {self._rank} has failed:\n{''.join(lines).rstrip()}"
        else:
            text = f"Rank {self._rank} has ended the fit with {text_of(exception, repr)}."
        is_first = self._report(Failure(self._rank, has_died=False, text=text))
        return text if is_first and not isinstance(exception, KeyboardInterrupt) else None

    def finish(self) -> None:
        """Writes to the store that this rank has ended the fit: its process may end."""
        self.leave()
        self.query_store(lambda: self._store.set(f"finished/{self._rank}", ""), None)

    def set_waiting(self, is_waiting: bool) -> None:
        """Writes to the store whether this rank waits for others, if that has changed."""
        if is_waiting != self._is_waiting and not self._has_left:
            self._is_waiting = is_waiting
            self.query_store(lambda: self._store.add(_NUM_IDLE, 1 if is_waiting else -1), None)

    def are_all_idle(self) -> bool:
        """Returns whether every rank waits for others, or has ended or raised."""
        return self.query_store(lambda: self._store.add(_NUM_IDLE, 0), 0) >= self._world_size

    def leave(self) -> None:
        """Writes to the store that this rank takes no further part; it counts as waiting."""
        self.set_waiting(True)
        self._has_left = True

    def leave_by_exception(self) -> None:
        """Writes to the store that an exception ends the fit on this rank, which is busy with it at first."""
        self.set_busy(True)
        self.leave()
        self.query_store(lambda: self._store.set(f"raised/{self._rank}", ""), None)

    def set_busy(self, is_busy: bool) -> None:
        """Writes to the store whether this rank, which has raised, works on without the others, if that has changed."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self.query_store(lambda: self._store.add(_NUM_BUSY, 1 if is_busy else -1), None)

    def is_one_busy(self) -> bool:
        """Returns whether a rank that has raised works on without the others; False once any rank has died."""
        is_busy = self.query_store(lambda: self._store.add(_NUM_BUSY, 0) > 0 and not self._store.check([_DIED]), False)
        return is_busy and self._find_dead() is None

    def raise_together(self, ranks: Sequence[int]) -> bool:
        """Returns whether exceptions end the fit on all of these ranks, too; waits a moment for them.

        The first rank that calls it decides for all, so that a rank which raises later than others does not wait where
        these have not waited for it.
        """
        keys = [f"raised/{rank}" for rank in ranks]
        has_ended = poll(
            lambda: self.query_store(lambda: self._store.check(keys) or self._store.check([_ENDING]), False),
            times.STALLED_S,
        )
        decision = "together" if has_ended else "alone"
        return self.query_store(lambda: self._store.compare_set(_ENDING, "", decision) == b"together", False)

    def failure(self) -> Failure | None:
        """Returns which other rank has failed first, as far as known; None if none has."""
        if self._failure is None:
            self._failure = self._reported() or self._died()
        return self._failure

    def has_died(self) -> bool:
        """Returns whether the process of a rank has ended in the middle of the fit."""
        return (self._failure is not None and self._failure.has_died) or self._find_dead() is not None

    def failure_soon(self) -> Failure | None:
        """Waits a moment for a `failure`: connections are closed before the process has ended."""
        poll(lambda: self.failure() is not None, times.CAUSE_S)
        return self.failure()

    def _reported(self) -> Failure | None:
        text = self._get("failed")
        if not text:
            return None
        failure = Failure(*json.loads(text))
        return None if failure.rank == self._rank else failure._replace(text=escape_controls(failure.text))

    def _died(self) -> Failure | None:
        rank = self._find_dead()
        if rank is None:
            return None
        process = f" {self._processes[rank].split()[2]}" if rank in self._processes else ""
        text = f"Rank {rank} has died: its process{process} has ended in the middle of the fit."
        failure = Failure(rank, has_died=True, text=text)
        self._report(failure)
        return failure

    def _find_dead(self) -> int | None:
        ended = {rank for rank, process in self._processes.items() if _is_gone(process)} | self._lifelines.ended
        dead = next((rank for rank in sorted(ended) if self._get(f"finished/{rank}") is None), None)
        if dead is not None:
            self.query_store(lambda: self._store.set(_DIED, ""), None)  # for ranks that cannot see it
        # Rank 0 takes the store with it, also when it has ended as intended.
        return None if self._is_store_lost and self._may_be_over() else dead

    def _report(self, failure: Failure) -> bool:
        """Writes a failure to the store if it is the first one; returns whether it was."""
        text = json.dumps(failure)
        return self.query_store(lambda: self._store.compare_set("failed", "", text) == text.encode(), False)

    def _get(self, key: str) -> str | None:
        """Returns the value of a key in the store; None if there is none."""
        return self.query_store(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)


def _process_name(pid: int) -> str | None:
    """Returns a name that no other process ever has; None if it has ended, or cannot be seen."""
    fields, namespace = process_fields(pid), namespace_name("pid")
    # Field 22 of proc(5) is the start time.
    return None if namespace is None or fields is None or fields[0] in "ZX" else f"{namespace} {pid} {fields[19]}"


@cache
def namespace_name(kind: str) -> str | None:
    """Returns a name of this process's namespace, "pid" or "net", that no other host or container has.

    None where the kernel does not tell, as in some sandboxes.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot} {os.stat(f'/proc/self/ns/{kind}').st_ino}"
    except OSError:
        return None


def _is_gone(process: str) -> bool:
    """Returns whether a process of this host has ended; False for one of another host, or if that is unknown."""
    own = _process_name(os.getpid())
    if not process or own is None or own.split()[:2] != process.split()[:2]:
        return False
    return _process_name(int(process.split()[2])) != process
