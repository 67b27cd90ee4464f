"""ComputingProbe: whether a rank that shows no progress uses CPU time."""

from __future__ import annotations

import time

from lightning_commopt.watch.hangs.process import descendants, process_state, thread_cpu_s

_MAX_WINDOW_S = 4.0
_COMPUTING_SHARE = 0.1


class ComputingProbe:
    """Samples the CPU time of a thread, which has a number in the kernel, while it makes no other progress.

    ``after_s`` seconds without progress `is_computing` is needed.
    """

    def __init__(self, pid: int, thread: int, after_s: float) -> None:
        self._pid, self._thread = pid, thread
        self._window_s = min(_MAX_WINDOW_S, after_s / 4)
        self._samples: list[tuple[float, float]] = []

    def sample(self, idle_s: float, *, with_children: bool) -> None:
        """Takes a sample if it is time for one; with the CPU time of children if these compute for the process."""
        now = time.monotonic()
        if idle_s < self._window_s:
            self._samples.clear()
        elif not self._samples or now - self._samples[-1][0] >= self._window_s / 4:
            used_s = thread_cpu_s(self._pid, self._thread)
            if with_children:
                used_s += sum(process_state(pid).cpu_s for pid in descendants(self._pid))
            self._samples = [*(each for each in self._samples if now - each[0] < 2 * self._window_s), (now, used_s)]

    def is_computing(self) -> bool:
        """Returns whether at least a tenth of a core was used in the last seconds; a waiting thread uses none."""
        if len(self._samples) < 2:
            return False
        (begin, before_s), (end, after_s) = self._samples[0], self._samples[-1]
        return after_s - before_s >= _COMPUTING_SHARE * (end - begin)
