"""The events of gradient sync that a hook reports to recorders and NVTX ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of gradients: its index from 0, its size, its parameters, and whether it is the last of a backward."""

    index: int
    gradient_bytes: int
    names: tuple[str, ...]
    is_last: bool


START, SEND, ARRIVE, END = range(4)
"""The events of one bucket's sync.

START: it leaves the queue, to be compressed or sent. SEND: a collective starts, or the first of several that overlap.
ARRIVE: it is done, or the last of several that overlap. END: the bucket holds the average.
"""

DUE, APPLIED = range(4, 6)
"""Further events of an exchange of DiLoCo, on the thread that trains.

DUE: a step waits until the exchange has ended. APPLIED: its result is in the model.
"""


class BucketSync(ABC):
    """Observes the sync of one bucket: the hook notes START, pairs of SEND and ARRIVE, and END, on any thread.

    For CUDA tensors the current stream is the stream of the sync, and the host may be far ahead of it. After a failure
    no further event is noted.
    """

    __slots__ = ()

    @abstractmethod
    def note(self, event: int, wire_bytes: int = 0) -> None:
        """Notes an event. With END, ``wire_bytes`` is the payload that this rank passed to collectives."""


class SyncObserver(ABC):
    """Observes every bucket that becomes ready, and exchanges if it wants to."""

    @abstractmethod
    def ready(self, bucket: BucketInfo) -> BucketSync:
        """Called in backward when all gradients of a bucket are ready; returns the observer of this bucket's sync."""

    def exchange(self, fragment: BucketInfo) -> BucketSync:
        """Called when an exchange of DiLoCo begins after an optimizer step; it may continue during further steps.

        Args:
            fragment: ``gradient_bytes`` is the size of the difference that is exchanged.
        """
        return BucketSyncs([])


class Observers(list[SyncObserver]):
    """Several observers as one."""

    def add(self, observer: SyncObserver) -> None:
        if observer not in self:
            self.append(observer)

    def remove(self, observer: SyncObserver) -> None:
        """Removes an observer, if it was added."""
        if observer in self:
            super().remove(observer)

    def ready(self, bucket: BucketInfo) -> BucketSync:
        return self[0].ready(bucket) if len(self) == 1 else BucketSyncs([observer.ready(bucket) for observer in self])

    def exchange(self, fragment: BucketInfo) -> BucketSync:
        return BucketSyncs([observer.exchange(fragment) for observer in self])


class BucketSyncs(BucketSync):
    """Several syncs as one: those of several observers, or of several buckets that travel together."""

    def __init__(self, syncs: list[BucketSync]) -> None:
        self._syncs = syncs

    def note(self, event: int, wire_bytes: int = 0) -> None:
        for sync in self._syncs:
            sync.note(event, wire_bytes)
