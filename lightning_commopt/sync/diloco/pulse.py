"""Pulse: shows which ranks' processes are running, without messages that anybody waits for.

A rank that writes a checkpoint or compiles is slow, and worth waiting for; one that was killed or frozen is not. In the
latter all threads have stopped. So each rank has a thread that increments a counter in the store, and the others watch
whether it grows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from contextlib import suppress

import torch.distributed as dist

from lightning_commopt.sync.store import MAX_POLL_GAP_S

_BEAT_S = 1.0
"""Longest time between two beats (increments). A beat is one small message to the host of the store."""
_BEATS_IN_PATIENCE = 4
"""Minimum number of beats within ``silence_s``, so that a busy machine may delay one or two without silence."""


class Pulse:
    """Shows the other ranks that this process is running, from a thread, until `close`.

    The ``store`` must be used by pulses and listeners only, and listeners must have the same ``silence_s``.
    """

    def __init__(self, store: dist.Store, rank: int, silence_s: float) -> None:
        self._store, self._key = store, str(rank)
        self._interval_s = min(_BEAT_S, silence_s / _BEATS_IN_PATIENCE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commopt-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_BEAT_S)  # limited, because the thread may wait for a store that does not answer

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is lost, which the training thread will notice and report
            while True:
                self._store.add(self._key, 1)
                if self._stop.wait(self._interval_s):
                    return


class Listener:
    """Finds ranks whose `Pulse` has stopped for ``silence_s``. Any thread may use it; it must ask repeatedly."""

    def __init__(self, store: dist.Store, silence_s: float) -> None:
        self._store, self._silence_s = store, silence_s
        self._beats: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}
        self._looked_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def silent(self, ranks: Collection[int]) -> set[int]:
        """Returns the ranks in ``ranks`` that have been silent for ``silence_s``.

        Only times between two calls count, and no pauses of this process or of the store. A silent rank stays silent
        until its next beat.
        """
        with self._lock:
            return {rank for rank in ranks if self._look(rank) >= self._silence_s}

    def _look(self, rank: int) -> float:
        """Returns the seconds of a rank's silence so far."""
        beats, now = self._store.add(str(rank), 0), time.monotonic()
        passed_s = min(now - self._looked_at.get(rank, now), MAX_POLL_GAP_S)
        is_same = beats == self._beats.get(rank)
        self._silent_s[rank] = self._silent_s[rank] + passed_s if is_same else 0.0
        self._beats[rank], self._looked_at[rank] = beats, now
        return self._silent_s[rank]
