"""Marks phases and buckets while a step runs, and makes records of them when the device has passed the marks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any, NamedTuple

from lightning_commopt.measure.clock import Clock
from lightning_commopt.measure.observer import BucketInfo, BucketSync, SyncObserver
from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord


class RecordedStep(NamedTuple):
    """A step, and the layout of its buckets by index."""

    record: StepRecord
    layout: dict[int, BucketInfo]


class StepRecorder(SyncObserver):
    """Records the steps of one rank, on the clock of its device. Only `take` waits for the device."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._phases: list[tuple[str | None, Any]] = []
        self._syncs: list[_RecordedSync] = []
        self._backward = 0
        self._pending: deque[_Marks] = deque()

    @property
    def origin_unix_s(self) -> float:
        """Unix time of second 0 of all records."""
        return self._clock.origin_unix_s

    def enter(self, phase: str | None) -> None:
        """Ends the current phase and begins another; None for what is not part of a step."""
        self._phases.append((phase, self._mark()))

    def ready(self, bucket: BucketInfo) -> BucketSync:
        sync = _RecordedSync(self._mark, bucket, self._backward)
        self._syncs.append(sync)
        self._backward += bucket.is_last
        return sync

    def end_step(self, step: int, num_samples: int) -> None:
        """Ends a step, which consists of all marks since the last one."""
        self.enter(None)
        self._pending.append(_Marks(step, num_samples, self._phases, self._syncs))
        self._phases, self._syncs, self._backward = [], [], 0

    def has(self, num_steps: int) -> bool:
        """Returns whether this many steps have ended, on the device too. Never waits."""
        return len(self._pending) >= num_steps and self._clock.has_passed(self._pending[num_steps - 1].end)

    def take(self, num_steps: int) -> list[RecordedStep]:
        """Returns at most this many steps, the oldest first; waits until the device has passed them."""
        if not self._pending:
            return []
        self._clock.wait_for(self._pending[min(num_steps, len(self._pending)) - 1].end)
        steps = [self._resolve(marks) for marks in islice(self._pending, num_steps)]
        for _ in steps:
            self._pending.popleft()
        return steps

    @property
    def num_lag_steps(self) -> int:
        """Steps to leave pending, as the device may not have passed them."""
        return self._clock.num_lag_steps

    @property
    def num_pending(self) -> int:
        """Steps that have ended and are not taken yet."""
        return len(self._pending)

    def _resolve(self, marks: _Marks) -> RecordedStep:
        seconds = self._clock.seconds
        began = [(name, seconds(mark)) for name, mark in marks.phases]
        phases = [Phase(name, at_s, end_s) for (name, at_s), (_, end_s) in pairwise(began) if name is not None]
        record = StepRecord(
            step=marks.step,
            num_samples=marks.num_samples,
            phases=tuple(phases),
            buckets=tuple([sync.span(seconds) for sync in marks.syncs if sync.has_ended]),
        )
        return RecordedStep(record, {sync.bucket.index: sync.bucket for sync in marks.syncs})


class _Marks(NamedTuple):
    """The marks of a step: the start of each phase, or of a pause (None), and those of its buckets."""

    step: int
    num_samples: int
    phases: list[tuple[str | None, Any]]
    syncs: list[_RecordedSync]

    @property
    def end(self) -> Any:
        return self.phases[-1][1]


class _RecordedSync(BucketSync):
    """Marks the sync of one bucket: ready, start, send and arrival of each collective, end."""

    __slots__ = ("_backward", "_mark", "_marks", "_wire_bytes", "bucket")

    def __init__(self, mark: Callable[[], Any], bucket: BucketInfo, backward: int) -> None:
        self._mark = mark
        self._marks = [mark()]
        self._wire_bytes: int | None = None
        self._backward = backward
        self.bucket = bucket

    def start(self) -> None:
        self._marks.append(self._mark())

    send = arrive = start

    def end(self, wire_bytes: int) -> None:
        self._marks.append(self._mark())
        self._wire_bytes = wire_bytes

    @property
    def has_ended(self) -> bool:
        """Whether the span is complete; after a failure it is not."""
        return self._wire_bytes is not None

    def span(self, seconds: Callable[[Any], float]) -> BucketSpan:
        """Returns the marks in seconds; the sync must have ended."""
        assert self._wire_bytes is not None
        ready_s, start_s, *wire_s, end_s = map(seconds, self._marks)
        return BucketSpan(
            index=self.bucket.index,
            backward=self._backward,
            gradient_bytes=self.bucket.gradient_bytes,
            wire_bytes=self._wire_bytes,
            ready_s=ready_s,
            start_s=start_s,
            end_s=end_s,
            wire=tuple(zip(wire_s[::2], wire_s[1::2], strict=True)),
        )
