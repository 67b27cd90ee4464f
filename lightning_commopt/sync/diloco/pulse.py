"""Pulse: which ranks' processes run, without a message that anybody waits for.

A rank that writes a checkpoint or compiles is slow, and worth waiting for; one that was killed or frozen is not. All
threads of the latter have stopped, so a thread that counts in the store tells the two apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist

from lightning_commopt.sync.store import LONGEST_LOOK_S

_BEAT_S = 1.0
"""Longest time between two beats. A beat is one small message to the host of the store."""
_BEATS_IN_PATIENCE = 4
"""Beats within ``silence_s`` at least, so that one or two that a busy machine delays are no silence."""


class Pulse:
    """Lets the other ranks see that this process runs, from a thread, until `close`.

    The ``store`` is only for pulses and for listeners, who are given the same ``silence_s``.
    """

    def __init__(self, store: dist.Store, rank: int, silence_s: float) -> None:
        self._store, self._key = store, str(rank)
        self._interval_s = min(_BEAT_S, silence_s / _BEATS_IN_PATIENCE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commopt-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_BEAT_S)  # a store that does not answer would keep it longer

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is lost, which the thread that trains finds out and reports
            while True:
                self._store.add(self._key, 1)
                if self._stop.wait(self._interval_s):
                    return


class Listener:
    """Finds ranks whose `Pulse` has stopped for ``silence_s``; for any thread, which asks again while it waits."""

    def __init__(self, store: dist.Store, silence_s: float) -> None:
        self._store, self._silence_s = store, silence_s
        self._beats: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}
        self._looked_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def silent(self, ranks: Collection[int]) -> set[int]:
        """Returns those of ``ranks`` that have been silent for ``silence_s``, as far as this listener has looked.

        A pause of this process, or of the store, does not count. A rank that was silent stays so until it beats again.
        """
        with self._lock:
            return {rank for rank in ranks if self._look(rank) >= self._silence_s}

    def _look(self, rank: int) -> float:
        """Returns the seconds of a rank's silence so far."""
        beats, now = self._store.add(str(rank), 0), time.monotonic()
        passed_s = min(now - self._looked_at.get(rank, now), LONGEST_LOOK_S)
        is_same = beats == self._beats.get(rank)
        self._silent_s[rank] = self._silent_s[rank] + passed_s if is_same else 0.0
        self._beats[rank], self._looked_at[rank] = beats, now
        return self._silent_s[rank]
