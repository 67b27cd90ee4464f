"""PeerWatchers: questions of a watcher to the watchers of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.snapshot import RankSnapshot
from lightning_commopt.watch.hangs.transport import Address, GoneError, UnreachableError, ask

_T = TypeVar("_T")

_MAX_AT_ONCE = 32
"""Maximum number of watchers that are asked at the same time, each by a thread. A lost host is detected only after
seconds, and for many ranks these would add up; more threads would only compete for one core."""


class PeerWatchers:
    """The watchers of all other ranks, once their addresses are known.

    Attributes:
        notices: `RankSnapshot.to_plain` of the ranks that have ended, by rank.
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
        """Stores the addresses, by rank; rank 0 returns a warning if some do not answer.

        Later that would look like a lost host.
        """
        self._addresses = {rank: address for rank, address in enumerate(addresses) if rank != self._rank}
        unanswered, deadline = list(self._addresses), time.monotonic() + times.GREET_S
        while self._rank == 0 and unanswered and time.monotonic() < deadline:
            answers = self._in_parallel(self._greeting, unanswered)
            unanswered = [rank for rank, answer in zip(unanswered, answers, strict=True) if answer is None]
            unanswered = [rank for rank in unanswered if rank not in self.notices]
            time.sleep(times.GREET_AGAIN_S)
        if self._rank != 0 or not unanswered:
            return None
        self._silent = set(unanswered)
        first = self._addresses[unanswered[0]]
        return (
            f"HangMonitor: the monitors of ranks {unanswered} cannot be reached (the first at {first.ip}:{first.port}):"
            " a hang is reported without the state of these ranks."
        )

    def snapshots(self) -> list[RankSnapshot]:
        """Returns snapshots of the other ranks; takes up to 20 seconds."""
        return self._in_parallel(self._ask_state, list(self._addresses))

    def is_lower_watching(self) -> bool:
        """Returns whether a lower rank is watched; asks several at once, as a lost host costs seconds."""
        lower = [rank for rank in range(self._rank) if rank not in self.notices]
        for at in range(0, len(lower), _MAX_AT_ONCE):
            answers = self._in_parallel(self._greeting, lower[at : at + _MAX_AT_ONCE])
            if any(answer is not None and answer.get("is_watching") for answer in answers):
                return True
        return False

    def send_all(self, **message: Any) -> list[dict[str, Any]]:
        """Sends a message to all, also those whose ranks have ended: one of them may be about to report.

        Returns:
            The answers of those that can be reached.
        """
        answers = self._in_parallel(lambda rank: self._send(rank, message), list(self._addresses))
        return [answer for answer in answers if answer is not None]

    def _ask_state(self, rank: int) -> RankSnapshot:
        address = self._addresses[rank]
        try:
            return RankSnapshot.from_plain(ask(address, self._key, {"state": True}, times.STATE_S))
        except (GoneError, UnreachableError, ValueError, TypeError) as error:
            if rank in self.notices:
                return RankSnapshot.from_plain(self.notices[rank])
            is_gone = isinstance(error, GoneError)
            state = "silent" if rank in self._silent else "unwatched" if is_gone else "unreachable"
            return RankSnapshot(rank=rank, host=address.host, state=state, detail=str(error))

    def _greeting(self, rank: int) -> dict[str, Any] | None:
        return self._send(rank, {"hello": True})

    def _send(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        with suppress(OSError):
            return ask(self._addresses[rank], self._key, message, times.HELLO_ANSWER_S)
        return None

    def _in_parallel(self, function: Callable[[int], _T], ranks: list[int]) -> list[_T]:
        if not ranks:
            return []
        with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(ranks))) as pool:
            return list(pool.map(function, ranks))
