"""Marks of a step while it runs: of phases, buckets, collectives and waits, until `StepRecorder` reads their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from lightning_commopt.measure.observer import APPLIED, DUE, END, BucketInfo, BucketSync
from lightning_commopt.measure.record import EXCHANGE, BucketSpan


class StepMarks(NamedTuple):
    """The marks of a step: the start of each phase or pause (None), and the marks of buckets, collectives and waits."""

    step: int
    num_samples: int
    phases: list[tuple[str | None, Any]]
    syncs: list[RecordedSync]
    collectives: list[IssuedCollective]
    waits: list[Interval]
    exchanges: list[RecordedExchange]

    @property
    def end(self) -> Any:
        return self.phases[-1][1]

    def all(self) -> Iterator[Any]:
        """Yields every mark on the device, once each."""
        yield from (mark for _, mark in self.phases)
        for sync in self.syncs:
            yield from sync.marks
        for interval in (*self.collectives, *self.waits):
            yield from (mark for mark in (interval.began, interval.ended) if mark is not None)


class RecordedSync(BucketSync):
    """Marks the sync of one bucket: ready, start, send and arrival of each collective, end."""

    __slots__ = ("_backward", "_has_passed", "_mark", "_wire_bytes", "bucket", "is_device_idle", "marks")

    def __init__(
        self,
        mark: Callable[[], Any],
        bucket: BucketInfo,
        backward: int,
        has_passed: Callable[[Any], bool] | None = None,
    ) -> None:
        self._mark, self._has_passed = mark, has_passed
        self.marks = [mark()]
        self.is_device_idle = False  # whether the device had computed the bucket before the host continued
        self._wire_bytes: int | None = None
        self._backward = backward
        self.bucket = bucket

    def note(self, event: int, wire_bytes: int = 0) -> None:
        self.marks.append(self._mark())
        if event == END:
            self._wire_bytes = wire_bytes
            if self._has_passed is not None:
                self.is_device_idle = self._has_passed(self.marks[0])

    @property
    def has_ended(self) -> bool:
        """Whether the span is complete; after a failure it is not."""
        return self._wire_bytes is not None

    def span(self, seconds: Callable[[Any], float]) -> BucketSpan:
        """Returns the marks in seconds; the sync must have ended."""
        assert self._wire_bytes is not None
        return _span(self.bucket, self._backward, self._wire_bytes, map(seconds, self.marks))


class RecordedExchange(BucketSync):
    """Marks an exchange of DiLoCo, and the wait for it, on the host's clock, since exchanges use the host's memory.

    Args:
        fragment: what is exchanged.
        wait: begins a wait of the step; see `StepRecorder.wait`.
        exchanges: called with this exchange when its result is applied, so that it belongs to that step.
    """

    __slots__ = ("_bytes", "_exchanges", "_times", "_wait", "_waiting", "fragment")

    def __init__(
        self, fragment: BucketInfo, wait: Callable[[], Interval | None], exchanges: Callable[[RecordedExchange], None]
    ) -> None:
        self.fragment = fragment
        self._wait, self._exchanges = wait, exchanges
        self._times = [time.perf_counter()]
        self._bytes = 0
        self._waiting: Interval | None = None

    def note(self, event: int, wire_bytes: int = 0) -> None:
        if event == DUE:
            self._waiting = self._wait()
        elif event == APPLIED:
            if self._waiting is not None:
                self._waiting.end()
            self._exchanges(self)
        else:
            self._times.append(time.perf_counter())
            self._bytes += wire_bytes

    def span(self, seconds: Callable[[float], float]) -> BucketSpan:
        """Returns the exchange; ``seconds`` converts times of the host."""
        return _span(self.fragment, EXCHANGE, self._bytes, map(seconds, self._times))


def _span(bucket: BucketInfo, backward: int, wire_bytes: int, times_s: Iterable[float]) -> BucketSpan:
    ready_s, start_s, *wire_s, end_s = times_s
    return BucketSpan(
        index=bucket.index,
        backward=backward,
        gradient_bytes=bucket.gradient_bytes,
        wire_bytes=wire_bytes,
        ready_s=ready_s,
        start_s=start_s,
        end_s=end_s,
        wire=tuple(zip(wire_s[::2], wire_s[1::2], strict=True)),
    )


class Interval:
    """A time and the marks of its ends, such as a wait of the device."""

    __slots__ = ("_mark", "began", "ended")

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.began, self.ended = mark(), None

    def end(self) -> None:
        self.ended = self._mark()


class IssuedCollective(Interval):
    """A collective. It has no end if torch does not report one."""

    __slots__ = ("about",)

    def __init__(self, mark: Callable[[], Any], operation: str, phase: str, source: str, num_bytes: int) -> None:
        super().__init__(mark)
        self.about = operation, phase, source, num_bytes


class BlockingCall:
    """A call that issues collectives of an operation and waits for them."""

    __slots__ = ("_collectives", "_num_before", "_operation")

    def __init__(self, operation: str, collectives: list[IssuedCollective]) -> None:
        self._operation, self._collectives, self._num_before = operation, collectives, len(collectives)

    def end(self) -> None:
        for collective in self._collectives[self._num_before :]:
            if collective.ended is None and collective.about[0] == self._operation:
                collective.end()
