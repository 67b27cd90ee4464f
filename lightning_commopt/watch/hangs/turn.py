"""Turn: makes only one of the watchers that are about to report the same hang report it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_FREE, _ASKS, _HAS = range(3)


class Turn:
    """Whether a watcher reports now, as agreed with the watchers of all other ranks.

    A watcher that wants to report asks all others. A watcher that reports refuses, and so does one of a lower rank that
    asks itself; one of a higher rank gives way. So of two watchers that can reach each other only one reports, whoever
    asks first, and the lowest of those that ask is not refused unless another one reports already. No watcher decides
    for the others or remembers what it has allowed: any of them may end at any time, and those that do not answer are
    not waited for.

    This differs from Ricart and Agrawala, "An optimal algorithm for mutual exclusion in computer networks" (1981), in:
    1. Ranks take the place of the clock. 2. A watcher that is refused does not wait, since it has nothing to report.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._state = _FREE

    def take(self, ask_others: Callable[[], Iterable[bool]]) -> bool:
        """Takes the turn until `give_back`, unless another watcher has it; returns whether it is taken.

        ``ask_others`` calls `refuse` of all other watchers, and returns the answers of those that can be reached.
        """
        with self._lock:
            self._state = _ASKS
        is_refused = any(ask_others())
        with self._lock:
            self._state = _FREE if is_refused or self._state != _ASKS else _HAS
            return self._state == _HAS

    def give_back(self) -> None:
        """Lets others report. Call it after they were notified of this report."""
        with self._lock:
            self._state = _FREE

    def refuse(self, rank: int) -> bool:
        """Returns whether the watcher of another rank may not report now; gives way to it if it may."""
        with self._lock:
            is_refused = self._state == _HAS or (self._state == _ASKS and self._rank < rank)
            if not is_refused:
                self._state = _FREE
            return is_refused
