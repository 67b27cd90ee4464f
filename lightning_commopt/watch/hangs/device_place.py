"""Determines where in training a rank waits, from the collectives that it has called.

With a GPU the host runs ahead: its thread may be a step further when it waits for the device, which is still in a
collective of the previous step. Then the place where that collective was called is the one that counts.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_commopt.watch.hangs.flight_recorder import Collective
from lightning_commopt.watch.hangs.marks import BACKWARD, PHASE, Mark
from lightning_commopt.watch.hangs.snapshot import SIGTERM_BROADCAST, RankSnapshot, place_in_training


class Span(NamedTuple):
    """The time from a phase's mark to the next one."""

    begin_s: float  # on the monotonic clock of the rank's host
    end_s: float  # infinite for the phase that the host is in

    @property
    def is_over(self) -> bool:
        return self.end_s < math.inf


def current_span(marks: Sequence[Mark]) -> Span:
    """Returns the time of the phase that the host is in."""
    return Span(next((mark.at_s for mark in reversed(marks) if mark.kind == PHASE), -math.inf), math.inf)


def find_span(collective: Collective, marks: Sequence[Mark]) -> Span | None:
    """Returns the time of the phase in which a collective was called; None if its mark is not kept any more."""
    begins_s = [mark.at_s for mark in marks if mark.kind == PHASE]
    number = bisect_right(begins_s, _called_s(collective))
    return Span(begins_s[number - 1], [*begins_s, math.inf][number]) if number else None


def follow_device(snapshot: RankSnapshot, marks: Sequence[Mark]) -> Span:
    """Moves a snapshot to where the oldest collective was called that the device has not finished.

    The snapshot is not moved if its thread is in a collective itself, or has raised an error of its own, or if nothing
    is outstanding: then the device computes, and the rank waits for nobody. Before Lightning's broadcast the thread
    copies a flag to the device, and so waits until the device has computed everything that was called before.

    The snapshot has its collectives; its phase, step and what belongs to them, or its ``device_step``, are changed.
    Returns the time of its phase.
    """
    now = current_span(marks)
    if snapshot.called is not None:
        return now
    current, outstanding = snapshot.current_collective(), snapshot.outstanding_collective()
    snapshot.called = None if current is None else current.signature.operation
    if outstanding is None or not (snapshot.state == "running" or snapshot.is_consequence):
        if snapshot.hook == SIGTERM_BROADCAST and snapshot.state == "running" and snapshot.parsed_collectives():
            before = [mark for mark in marks if mark.at_s < now.begin_s]
            snapshot.device_step, snapshot.is_computing = place_in_training(before, {})["step"], True
        return now
    span = find_span(outstanding, marks) or now
    if span.is_over:
        place = place_in_training([mark for mark in marks if mark.at_s < span.end_s], {})
        for name in ("phase", "step", "batch", "passed", "ready"):
            setattr(snapshot, name, place[name])
        snapshot.bucket, snapshot.all_ready = None, snapshot.phase == BACKWARD
        snapshot.is_ahead, snapshot.hook, snapshot.place, snapshot.worker_places = True, None, None, []
    elif snapshot.hook == SIGTERM_BROADCAST and snapshot.called != "broadcast":
        snapshot.hook = None
    return span


def add_device_bucket(snapshot: RankSnapshot, work: dict[str, Any]) -> None:
    """Adds the oldest bucket that the device has not averaged, if it is one of the snapshot's backward.

    The device may simply be computing. So if collectives are recorded, one must be outstanding.
    """
    is_of_backward = snapshot.phase == BACKWARD and work.get("device_step") == snapshot.step
    may_wait = snapshot.outstanding_collective() is not None or not snapshot.parsed_collectives()
    if is_of_backward and may_wait and snapshot.bucket is None:
        snapshot.bucket, snapshot.all_ready = work["device_bucket"], True


def find_unmarked_bucket(snapshot: RankSnapshot, span: Span, num_buckets: int) -> None:
    """Finds the bucket that a rank waits for, of a DDP without a hook, among the all-reduces of a backward.

    ``span`` is the time of that backward, and ``num_buckets`` the number of all buckets of the model.
    """
    called = [
        collective
        for collective in snapshot.parsed_collectives()
        if span.begin_s <= _called_s(collective) < span.end_s and collective.signature.operation == "all_reduce"
    ]
    snapshot.ready = len(called)
    snapshot.all_ready = span.is_over or len(called) >= num_buckets
    current = snapshot.current_collective()
    snapshot.bucket = called.index(current) if current in called else None


def _called_s(collective: Collective) -> float:
    return collective.called_unix_s - time.time() + time.monotonic()
