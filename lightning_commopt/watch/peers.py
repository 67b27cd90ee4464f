"""Peers: how a rank learns that another has failed, without a message that the other would have to send."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

_ORDERLY = ("SIGTERMException", "_TunerExitException")
"""Lightning's exceptions that end a fit on all ranks, as they should."""

_DEATH_S = 0.5


class Peers:
    """The ranks of one fit: which of them have failed.

    A rank that raises says so in the store. Of one that was killed, or has called ``os._exit``, the ranks on the same
    host find that its process has gone though it has not ended the fit, and say so.

    Args:
        store: of the ranks of one fit; keys of ours only.
        rank: this rank.
        ranks_here: the ranks on this host.
    """

    def __init__(self, store: dist.Store, rank: int, ranks_here: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._others_here = [other for other in ranks_here if other != rank]
        self._processes: dict[int, str] = {}
        self._failure: str | None = None
        self._is_store_lost = False
        store.set(f"process/{rank}", _process_name(os.getpid()) or "")

    def ask(self, question: Callable[[], _T], without: _T) -> _T:
        """Returns what the store answers; ``without`` once it is lost.

        It goes with the process of rank 0, but for torchrun, which has one of its own.
        """
        if not self._is_store_lost and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._is_store_lost = _is_gone(self._processes.get(0, ""))
        if not self._is_store_lost:
            try:
                return question()
            except RuntimeError:  # not a second time: torch writes a page to the log
                self._is_store_lost = True
        return without

    def learn(self) -> None:
        """Takes in which processes the other ranks of this host are, as far as they have said; cheap once all have."""
        for rank in self._others_here:
            if rank not in self._processes and (process := self._get(f"process/{rank}")) is not None:
                self._processes[rank] = process

    def fail(self, exception: BaseException) -> str | None:
        """Says that this rank has failed, unless another has done so before, which is then the cause.

        Returns:
            What it says, with the traceback; None if it says nothing.
        """
        if is_orderly(exception):
            return None
        lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
        text = f"Rank {self._rank} has failed:\n{''.join(lines).rstrip()}"
        return text if self._say(self._rank, text) else None

    def finish(self) -> None:
        """Says that this rank has ended the fit: its process may go."""
        self.ask(lambda: self._store.set(f"finished/{self._rank}", ""), None)

    def failure(self) -> str | None:
        """Returns which other rank has failed first, and how, as far as that can be known; None if none has."""
        if self._failure is None:
            self._failure = self._reported() or self._died()
        return self._failure

    def some_died(self) -> bool:
        """Returns whether the process of another rank of this host has gone in the middle of the fit."""
        return self._dead() is not None

    def failure_soon(self) -> str | None:
        """As `failure`, for the moment in which connections are closed and the process is not yet gone."""
        deadline = time.monotonic() + _DEATH_S
        while (failure := self.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return failure

    def _reported(self) -> str | None:
        rank, _, text = (self._get("failed") or "").partition("\n")
        return text if text and int(rank) != self._rank else None

    def _died(self) -> str | None:
        rank = self._dead()
        if rank is None:
            return None
        pid = self._processes[rank].split()[2]
        text = f"Rank {rank} has died: its process {pid} has gone in the middle of the fit."
        self._say(rank, text)
        return text

    def _dead(self) -> int | None:
        for rank, process in self._processes.items():
            if _is_gone(process) and self._get(f"finished/{rank}") is None:
                return rank
        return None

    def _say(self, rank: int, text: str) -> bool:
        """Says that a rank has failed, if nothing has been said yet; returns whether it was so."""
        said = f"{rank}\n{text}"
        return self.ask(lambda: self._store.compare_set("failed", "", said) == said.encode(), False)

    def _get(self, key: str) -> str | None:
        """Returns what the store has for a key; None if it has nothing."""
        return self.ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)


def is_orderly(exception: BaseException) -> bool:
    """Returns whether an exception ends the fit of all ranks, as it should: a signal, or one of Lightning's own."""
    return not isinstance(exception, Exception) or type(exception).__name__ in _ORDERLY


def _process_name(pid: int) -> str | None:
    """Returns what tells a process from all others, at all times; None if it is gone, or cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        state, start = fields[0], fields[19]  # numbers 3 and 22 in proc(5)
        return None if state in "ZX" else f"{_host()} {pid} {start}"
    except OSError:
        return None


@cache
def _host() -> str:
    """Returns what tells this host, or container, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _is_gone(process: str) -> bool:
    """Returns whether a process of this host has ended; False for one of another host, or that is not known."""
    own = _process_name(os.getpid())
    if not process or own is None or own.split()[:2] != process.split()[:2]:
        return False
    return _process_name(int(process.split()[2])) != process
