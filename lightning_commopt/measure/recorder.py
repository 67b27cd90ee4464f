"""Marks phases and buckets while a step runs, and turns them into records when the device has passed the marks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from lightning_commopt.measure.clock import Clock, HostClock
from lightning_commopt.measure.marks import (
    BlockingCall,
    Interval,
    IssuedCollective,
    RecordedExchange,
    RecordedSync,
    StepMarks,
)
from lightning_commopt.measure.observer import BucketInfo, BucketSync, BucketSyncs, SyncObserver
from lightning_commopt.measure.record import Collective, Phase, StepRecord

# Maximum number of steps that `StepRecorder.end_step` turns into records. Each call adds one step, so with 2 it can
# catch up.
_RESOLVED_AT_ONCE = 2
_source: ContextVar[str] = ContextVar("source", default="")
_is_part: ContextVar[bool] = ContextVar("is_part", default=False)


@contextmanager
def issued_by(source: str) -> Iterator[None]:
    """Sets the source of all collectives that this thread issues within the context; see `Collective`."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


@contextmanager
def parts_of_one() -> Iterator[None]:
    """Hides the collectives that this thread issues within the context, since they are recorded as a single one."""
    token = _is_part.set(True)
    try:
        yield
    finally:
        _is_part.reset(token)


class StepRecorder(SyncObserver):
    """Records the steps of one rank, on the clock of its device. Only `take` waits for the device."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._mark = clock.mark
        self._phases: list[tuple[str | None, Any]] = []
        self._syncs: list[RecordedSync] = []
        self._collectives: list[IssuedCollective] = []
        self._waits: list[Interval] = []
        self._exchanges: list[RecordedExchange] = []
        # A device may run collectives in another stream than the caller's, where a mark would not show their time.
        self._collective_mark = clock.mark if isinstance(clock, HostClock) else lambda: None
        self._has_passed = None if isinstance(clock, HostClock) else clock.has_passed
        self._backward = 0
        self._thread = threading.get_ident()
        self._resolved: deque[StepRecord] = deque()
        self._pending: deque[StepMarks] = deque()

    def enter(self, phase: str | None) -> None:
        """Ends the current phase and begins another, or a pause (None), which belongs to no step."""
        self._phases.append((phase, self._mark()))

    def call_in_pause(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function whose time belongs to no step, and returns its result; then the current phase continues."""
        phase = self._phase
        self.enter(None)
        try:
            return function(*args, **kwargs)
        finally:
            self.enter(phase)

    def ready(self, bucket: BucketInfo) -> BucketSync:
        if self._phases and self._phase is None:  # a LearningRateFinder trains at the start of an epoch
            return BucketSyncs([])
        sync = RecordedSync(self._mark, bucket, self._backward, self._has_passed)
        self._syncs.append(sync)
        self._backward += bucket.is_last
        return sync

    def exchange(self, fragment: BucketInfo) -> BucketSync:
        return RecordedExchange(fragment, self.wait, lambda ended: self._exchanges.append(ended))

    def issue(self, operation: str, num_bytes: int) -> IssuedCollective | None:
        """Records that a collective is issued, on any thread; see `Collective`. None for a part of a recorded one."""
        return None if _is_part.get() else self._issue(self._collective_mark, operation, num_bytes)

    def issue_in_stream(self, operation: str, num_bytes: int) -> IssuedCollective:
        """Records a collective that the current stream of the device waits for, until the result's ``end``.

        Between two steps it has no times, as a validation may issue any number of collectives there.
        """
        return self._issue(self._mark if self._phase is not None else self._collective_mark, operation, num_bytes)

    def wait(self) -> Interval | None:
        """Records that the step's computation waits, for another stream or for an exchange, until the result's ``end``.

        None between two steps.
        """
        if self._phase is None:
            return None
        wait = Interval(self._mark)
        self._waits.append(wait)
        return wait

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Records that the step waits for what this thread waits for within, if it is the recorder's own thread."""
        wait = self.wait() if threading.get_ident() == self._thread else None
        yield
        if wait is not None:
            wait.end()

    @property
    def _phase(self) -> str | None:
        return self._phases[-1][0] if self._phases else None

    def call(self, operation: str, num_bytes: int) -> BlockingCall:
        """Records when a blocking call returns, as the end of its collectives where these report none."""
        return BlockingCall(operation, self._collectives)

    def end_step(self, step: int, num_samples: int) -> None:
        """Ends a step, which consists of all marks since the last one.

        Where reading marks takes time, it is spread over steps: a few are resolved here, if the device has passed them.
        """
        self.enter(None)
        self._pending.append(self._cut(step, num_samples))
        for _ in range(_RESOLVED_AT_ONCE if self.clock.num_lag_steps else 0):
            if len(self._pending) > self.clock.num_lag_steps and self.clock.has_passed(self._pending[0].end):
                self._resolve_oldest()

    def reset(self) -> None:
        """Drops all marks since the last step."""
        self.clock.release(self._cut(0, 0).all())

    def has(self, num_steps: int) -> bool:
        """Returns whether ``num_steps`` steps have ended, also on the device. Never waits."""
        last = num_steps - len(self._resolved) - 1
        return last < 0 or (last < len(self._pending) and self.clock.has_passed(self._pending[last].end))

    def take(self, num_steps: int) -> list[StepRecord]:
        """Returns at most ``num_steps`` steps, the oldest first; waits until the device has passed them."""
        num_unresolved = min(num_steps - len(self._resolved), len(self._pending))
        if num_unresolved > 0:
            self.clock.wait_for(self._pending[num_unresolved - 1].end)
            for _ in range(num_unresolved):
                self._resolve_oldest()
        return [self._resolved.popleft() for _ in range(min(num_steps, len(self._resolved)))]

    @property
    def num_pending(self) -> int:
        """Number of steps that have ended and were not taken yet."""
        return len(self._resolved) + len(self._pending)

    def _cut(self, step: int, num_samples: int) -> StepMarks:
        lists = self._phases, self._syncs, self._collectives, self._waits, self._exchanges
        self._phases, self._syncs, self._collectives, self._waits, self._exchanges = [], [], [], [], []
        self._backward = 0
        return StepMarks(step, num_samples, *lists)

    def _issue(self, mark: Callable[[], Any], operation: str, num_bytes: int) -> IssuedCollective:
        issued = IssuedCollective(mark, operation, self._phase or "pause", _source.get(), num_bytes)
        self._collectives.append(issued)
        return issued

    def _resolve_oldest(self) -> None:
        marks = self._pending.popleft()
        self._resolved.append(self._resolve(marks))
        self.clock.release(marks.all())

    def _resolve(self, marks: StepMarks) -> StepRecord:
        seconds = self.clock.seconds
        for collective in [issued for issued in marks.collectives if issued.ended is not None]:
            # The device may have ended the step before a stream that nothing waited for reaches its mark.
            if not self.clock.has_passed(collective.ended):
                collective.began = collective.ended = None
        began = [(name, seconds(mark)) for name, mark in marks.phases]
        phases = [Phase(name, at_s, end_s) for (name, at_s), (_, end_s) in pairwise(began) if name is not None]
        ended = [sync for sync in marks.syncs if sync.has_ended]
        buckets = [sync.span(seconds) for sync in ended]
        ready = zip([bucket.ready_s for bucket in buckets], [sync.is_device_idle for sync in ended], strict=True)
        return StepRecord(
            step=marks.step,
            num_samples=marks.num_samples,
            phases=tuple(phases),
            buckets=(*[exchange.span(self.clock.host_seconds) for exchange in marks.exchanges], *buckets),
            collectives=_spans(marks.collectives, [at_s for _, at_s in began], seconds),
            waits=tuple([(seconds(wait.began), seconds(wait.ended)) for wait in marks.waits if wait.ended is not None]),
            host_bound_s=None if self._has_passed is None else _host_bound_s(phases, sorted(ready)),
            layout={sync.bucket.index: sync.bucket for sync in marks.syncs},
        )


def _host_bound_s(phases: list[Phase], ready: list[tuple[float, bool]]) -> float:
    """Returns the time of the pieces of backward, each up to a ready bucket, that end with an idle device."""
    total_s = 0.0
    for name, reached_s, end_s in phases:
        for at_s, is_idle in ready if name == "backward" else ():
            if reached_s <= at_s <= end_s:
                total_s += (at_s - reached_s) * is_idle
                reached_s = at_s
    return total_s


def _spans(
    issued: list[IssuedCollective], boundaries_s: list[float], seconds: Callable[[Any], float]
) -> tuple[Collective, ...]:
    """Returns collectives in seconds. One without an end has blocked its thread until the next event."""
    starts_s = [None if collective.began is None else seconds(collective.began) for collective in issued]
    events_s: list[float] = []
    if any(collective.ended is None for collective in issued):
        events_s = sorted([*boundaries_s, *(at_s for at_s in starts_s if at_s is not None)])
    spans = []
    for collective, start_s in zip(issued, starts_s, strict=True):
        end_s = None if collective.ended is None else seconds(collective.ended)
        if start_s is not None and end_s is None:
            after = bisect_right(events_s, start_s)
            end_s = events_s[after] if after < len(events_s) else start_s
        spans.append(Collective(*collective.about, start_s, end_s))
    return tuple(spans)
