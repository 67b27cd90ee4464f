"""PeerWatchers: what a watcher asks the watchers of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import Address, GoneError, UnreachableError, ask

_T = TypeVar("_T")

_HELLO_S = 5.0
_GREET_S = 15.0
_GREET_AGAIN_S = 1.0
_STATE_S = 20.0
_NUM_ASKED_AT_ONCE = 32


class PeerWatchers:
    """The watchers of all other ranks, once their addresses are known.

    Args:
        rank: this one.
        key: that all watchers of a run have.

    Attributes:
        notices: by rank, what those that have ended have sent, as `RankSnapshot.to_plain` has it.
    """

    def __init__(self, rank: int, key: str) -> None:
        self._rank, self._key = rank, key
        self._addresses: dict[int, Address] = {}
        self._silent: set[int] = set()
        self.notices: dict[int, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        """Whether the addresses are known."""
        return bool(self._addresses)

    def meet(self, addresses: Sequence[Address]) -> str | None:
        """Stores the addresses, by rank. On rank 0, finds out which do not answer: later it would seem a lost host.

        Returns:
            A warning; None if there is nothing to warn of.
        """
        self._addresses = {rank: address for rank, address in enumerate(addresses) if rank != self._rank}
        unheard, deadline = list(self._addresses), time.monotonic() + _GREET_S
        while self._rank == 0 and unheard and time.monotonic() < deadline:
            answers = self._in_parallel(self._say_hello, unheard)
            unheard = [rank for rank, answer in zip(unheard, answers, strict=True) if answer is None]
            unheard = [rank for rank in unheard if rank not in self.notices]
            time.sleep(_GREET_AGAIN_S)
        if self._rank != 0 or not unheard:
            return None
        self._silent = set(unheard)
        first = self._addresses[unheard[0]]
        return (
            f"HangMonitor: the monitors of ranks {unheard} cannot be reached (the first at {first.ip}:{first.port}):"
            " a hang there is reported without what these ranks do."
        )

    def snapshots(self) -> list[RankSnapshot]:
        """Returns where the other ranks are; takes up to 20 seconds."""
        return self._in_parallel(self._ask_state, list(self._addresses))

    def is_lower_watching(self) -> bool:
        """Returns whether a lower rank is watched; asks several at once, as a host that is gone costs seconds."""
        lower = [rank for rank in range(self._rank) if rank not in self.notices]
        for at in range(0, len(lower), _NUM_ASKED_AT_ONCE):
            answers = self._in_parallel(self._say_hello, lower[at : at + _NUM_ASKED_AT_ONCE])
            if any(answer is not None and answer.get("is_watching") for answer in answers):
                return True
        return False

    def send_all(self, **message: Any) -> None:
        """Sends a message to all, also to those whose ranks have ended: one of them may be about to report."""

        def send(rank: int) -> None:
            with suppress(OSError):
                ask(self._addresses[rank], self._key, message, _HELLO_S)

        self._in_parallel(send, list(self._addresses))

    def _ask_state(self, rank: int) -> RankSnapshot:
        address = self._addresses[rank]
        try:
            return RankSnapshot.from_plain(ask(address, self._key, {"state": True}, _STATE_S))
        except (GoneError, UnreachableError, ValueError) as error:
            if rank in self.notices:
                return RankSnapshot.from_plain(self.notices[rank])
            is_gone = isinstance(error, GoneError)
            state = "silent" if rank in self._silent else "unwatched" if is_gone else "unreachable"
            return RankSnapshot(rank=rank, host=address.host, state=state, detail=str(error))

    def _say_hello(self, rank: int) -> dict[str, Any] | None:
        try:
            return ask(self._addresses[rank], self._key, {"hello": True}, _HELLO_S)
        except OSError:
            return None

    def _in_parallel(self, function: Callable[[int], _T], ranks: list[int]) -> list[_T]:
        if not ranks:
            return []
        with ThreadPoolExecutor(min(_NUM_ASKED_AT_ONCE, len(ranks))) as pool:
            return list(pool.map(function, ranks))
