"""Marks of phases and buckets while a step runs, made into records when the device has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any, NamedTuple

from lightning_commopt.measure.clock import Clock
from lightning_commopt.measure.observer import BucketInfo, BucketSync, SyncObserver
from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord


class RecordedStep(NamedTuple):
    """A step and its buckets.

    Attributes:
        record: of the step.
        layout: its buckets by index.
    """

    record: StepRecord
    layout: dict[int, BucketInfo]


class StepRecorder(SyncObserver):
    """Records the steps of one rank. Marking never waits; `take` does the rest.

    Args:
        clock: of the device that trains.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._phases: list[tuple[str | None, Any]] = []
        self._syncs: list[_RecordedSync] = []
        self._backward = 0
        self._pending: deque[_Marks] = deque()

    @property
    def origin_unix_s(self) -> float:
        """Second 0 of all records, in seconds since 1970."""
        return self._clock.origin_unix_s

    def enter(self, phase: str | None) -> None:
        """Ends the phase before, and begins another; None for what is not part of a step."""
        self._phases.append((phase, self._mark()))

    def ready(self, bucket: BucketInfo) -> BucketSync:
        sync = _RecordedSync(self._mark, bucket, self._backward)
        self._syncs.append(sync)
        self._backward += bucket.is_last
        return sync

    def end_step(self, step: int, num_samples: int) -> None:
        """Ends a step; all marks since the one before are its own.

        Args:
            step: its number.
            num_samples: that this rank trained on in it.
        """
        self.enter(None)
        self._pending.append(_Marks(step, num_samples, self._phases, self._syncs))
        self._phases, self._syncs, self._backward = [], [], 0

    def has(self, num_steps: int) -> bool:
        """Returns whether so many steps are over, for the device as well. Never waits."""
        return len(self._pending) >= num_steps and self._clock.has_passed(self._pending[num_steps - 1].end)

    def take(self, num_steps: int) -> list[RecordedStep]:
        """Returns at most so many steps, the oldest first; waits for the device if it has not passed them."""
        if not self._pending:
            return []
        self._clock.wait_for(self._pending[min(num_steps, len(self._pending)) - 1].end)
        steps = [self._resolve(marks) for marks in islice(self._pending, num_steps)]
        for _ in steps:
            self._pending.popleft()
        return steps

    @property
    def num_lag_steps(self) -> int:
        """Steps that had better stay pending, as the device may not have passed them."""
        return self._clock.num_lag_steps

    @property
    def num_pending(self) -> int:
        """Steps that have ended and were not taken."""
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
    """A step as it was marked: when each phase began, None for the end of the one before; and its buckets."""

    step: int
    num_samples: int
    phases: list[tuple[str | None, Any]]
    syncs: list[_RecordedSync]

    @property
    def end(self) -> Any:
        return self.phases[-1][1]


class _RecordedSync(BucketSync):
    """Marks what happens to one bucket: ready, start, each send and arrival, end."""

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
        """Whether there is a whole span; after a failure there is none."""
        return self._wire_bytes is not None

    def span(self, seconds: Callable[[Any], float]) -> BucketSpan:
        """Returns the marks as seconds; it must have ended."""
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
