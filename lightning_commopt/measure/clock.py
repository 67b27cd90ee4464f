"""Clocks: the host's for CPU, CUDA events for a GPU. Marking never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class HostClock:
    """The monotonic clock of the host. A clock makes marks, whose times can be read later.

    Attributes:
        origin_unix_s: second 0 of this clock, in seconds since 1970 on this host's clock.
        num_lag_steps: age in steps from which on reading a mark does not make the host wait.
    """

    num_lag_steps = 0

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self.origin_unix_s = time.time()

    # This is the bare function, because a step calls it some twenty times and a method would add to each call.
    mark: Any = staticmethod(time.perf_counter)

    def has_passed(self, mark: Any) -> bool:
        """Returns whether a mark lies in the past. Never waits."""
        return True

    def wait_for(self, mark: Any) -> None:
        """Waits until a mark has passed."""

    def seconds(self, mark: Any) -> float:
        """Returns the time of a mark, which must have passed, in seconds since the clock's origin."""
        since_s: float = mark - self._origin
        return since_s

    def host_seconds(self, at: float) -> float:
        """Returns a time of ``time.perf_counter`` in seconds since the clock's origin."""
        return at - self._origin

    def release(self, marks: Iterable[Any]) -> None:
        """Takes back marks that have passed and are not needed any more, for reuse."""


class CudaClock:
    """Events in the current stream of a CUDA device, which are reused. Its constructor synchronizes the device."""

    # CUDA returns the time between two events as float32 milliseconds, whose resolution gets worse the further they are
    # apart. So the event that times are measured from is replaced at this age.
    _BASE_LIFE_S = 10.0

    num_lag_steps = 20  # hosts do not need to run further ahead of their device than this

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unused: list[torch.cuda.Event] = []
        self._base = self.mark()
        self._base_s = 0.0
        torch.cuda.synchronize(device)
        self.origin_unix_s = time.time()
        self._origin = time.perf_counter()

    def mark(self) -> Any:
        """Returns an event that was recorded in the current stream, after all that is enqueued so far."""
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, mark: Any) -> float:
        """Returns the seconds from the origin to the event, to about a microsecond."""
        since_base_s: float = self._base.elapsed_time(mark) / 1e3
        at_s = self._base_s + since_base_s
        if since_base_s > self._BASE_LIFE_S:
            self._unused.append(self._base)
            self._base, self._base_s = mark, at_s
        return at_s

    def host_seconds(self, at: float) -> float:
        return at - self._origin

    def release(self, marks: Iterable[Any]) -> None:
        self._unused += [mark for mark in marks if mark is not self._base]


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    """Returns the clock for a device: events on CUDA, otherwise the host's clock."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
