"""Key spaces in the process group's store that no earlier attempt of a job has written to.

torchrun keeps one TCPStore for all attempts of a job, and torch adds no prefix to the keys of an attempt. So gloo and
NCCL would find addresses of processes that have ended, and our key "failed" would end a healthy attempt. The number of
restarts does not identify an attempt, since each node's agent counts separately and does not count every restart.
Therefore rank 0 draws a random name, and sends it to every rank that asks with a random token.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_commopt.compat.torch import default_store
from lightning_commopt.sync.groups import default_group

_FIRST_POLL_S = 0.001
"""First pause between two polls of the store. Pauses double, so ranks that arrive at the same time hardly wait."""
_LAST_POLL_S = 0.1
"""Longest pause between two polls, by which a rank may notice a change too late. A waiting rank polls ten times a
second."""
MAX_POLL_GAP_S = 1.0
"""Longest time between two polls that counts as waiting. If more has passed, this process or the store was paused, for
instance because the whole job was suspended. It must be far above `_LAST_POLL_S`, also on a busy machine."""

# For each default group: the store that has its key spaces, and a counter for each name of a key space.
_roots: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[dist.ProcessGroup, dict[str, Iterator[int]]] = WeakKeyDictionary()


class Agreement:
    """The ranks of one attempt agree on a name for it, in a store that may hold keys of earlier attempts.

    Only `wait` blocks; otherwise every rank calls `advance` until it returns true.

    Attributes:
        store: the store.
        name: the name of the attempt; None while it is unknown.
        missing: ranks that do not have the name yet. A rank other than 0 knows this only of itself.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = store
        self._rank = rank
        self._token = secrets.token_hex(8)
        self._answered: dict[int, bytes] = {}
        self.name: str | None = None
        self.missing = {rank} if rank else set(range(1, world_size))
        if rank:
            store.set(f"ask/{rank}", self._token)
        else:
            self.name = self._token

    def advance(self) -> bool:
        """Answers the ranks that have asked, or reads the answer; returns whether no rank is missing."""
        if self._rank == 0:
            for rank in [*self.missing]:
                self._answer(rank)
        elif self.name is None and self.store.check([f"answer/{self._token}"]):
            self.name = self.store.get(f"answer/{self._token}").decode()
            self.store.set(f"{self.name}/{self._rank}", "")
            self.missing.clear()
        return not self.missing

    def wait(self, timeout_s: float) -> str:
        """Waits until no rank is missing, and returns the name; raises a TimeoutError after ``timeout_s``."""
        if not poll(self.advance, timeout_s):
            missing = "rank 0" if self._rank else f"ranks {sorted(self.missing)}"
            raise TimeoutError(f"Rank {self._rank} has waited {timeout_s:g} s for {missing} to join the process group.")
        assert self.name is not None
        return self.name

    def _answer(self, rank: int) -> None:
        if self.store.check([f"{self._token}/{rank}"]):
            self.missing.remove(rank)
        elif self.store.check([f"ask/{rank}"]):
            # The token may be a leftover of an earlier attempt. Then no rank confirms the answer, and a new token
            # follows.
            token = self.store.get(f"ask/{rank}")
            if token != self._answered.get(rank):
                self.store.set(f"answer/{token.decode()}", self._token)
                self._answered[rank] = token


def poll(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until a condition is true; returns false if that takes longer than ``timeout_s``.

    It is used for conditions on a store, since ``Store.wait`` would block other threads that use the store. Pauses of
    the process do not count; see `MAX_POLL_GAP_S`.
    """
    waited_s, checked_at, pause_s = 0.0, time.monotonic(), _FIRST_POLL_S
    while not condition():
        if waited_s > timeout_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
        before, checked_at = checked_at, time.monotonic()
        waited_s += min(checked_at - before, MAX_POLL_GAP_S)
    return True


def key_space(name: str) -> dist.Store:
    """Returns an unused part of the default group's store. All ranks must make the same calls for each name."""
    number = next(_numbers.setdefault(default_group(), {}).setdefault(name, itertools.count()))
    return dist.PrefixStore(f"{name}/{number}", prepare_key_spaces())


def prepare_key_spaces() -> dist.Store:
    """Lets the ranks agree on the root of all key spaces, and returns it. All ranks must call it.

    Raises:
        TimeoutError: some ranks have not called it; the message names them.
    """
    group = default_group()
    if group not in _roots:
        # The user's program may have created the group, so its store may have keys of earlier attempts.
        store = default_store()
        name = _agree(store, dist.get_rank(), dist.get_world_size(), default_pg_timeout)
        _roots[group] = dist.PrefixStore(f"commopt/{name}", store)
    return _roots[group]


@contextmanager
def fresh_default_store() -> Generator[None, None, None]:
    """Returns a context in which new process groups ignore the keys of earlier attempts in torchrun's store.

    It changes nothing if rank 0 creates a store itself, since that is empty.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    inner = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("store") is None and kwargs.get("init_method") is None:
            timeout = kwargs.get("timeout") or default_pg_timeout
            requested = kwargs.get("rank", -1), kwargs.get("world_size", -1)
            store, rank, world_size = next(rendezvous("env://", *requested, timeout=timeout))
            store.set_timeout(timeout)
            name = _agree(store, rank, world_size, timeout)
            kwargs |= {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}
        inner(*args, **kwargs)

    dist.init_process_group = init_process_group
    try:
        yield
    finally:
        dist.init_process_group = inner


def _agree(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    return Agreement(dist.PrefixStore("commopt/attempt", store), rank, world_size).wait(timeout.total_seconds())
