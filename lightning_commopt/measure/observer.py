"""What a hook reports of its gradient sync, to recorders and NVTX ranges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of gradients as DDP hands it over.

    Attributes:
        index: of the bucket, from 0.
        gradient_bytes: of its buffer.
        names: of its parameters.
        is_last: whether it is the last one of its backward.
    """

    index: int
    gradient_bytes: int
    names: tuple[str, ...]
    is_last: bool


class BucketSync(ABC):
    """The sync of one bucket, as an observer sees it: the hook calls these methods in order, on any thread.

    For CUDA tensors the current stream is the one in which it happens, and the host may be far ahead of it. Each
    collective is a pair of `send` and `arrive`. After a failure no further method is called.
    """

    __slots__ = ()

    @abstractmethod
    def start(self) -> None:
        """The bucket leaves the queue: it is being compressed, or sent."""

    @abstractmethod
    def send(self) -> None:
        """A collective starts, or the first of several that overlap."""

    @abstractmethod
    def arrive(self) -> None:
        """The collective is done, or the last of several that overlap."""

    @abstractmethod
    def end(self, wire_bytes: int) -> None:
        """The bucket holds the average.

        Args:
            wire_bytes: payload that this rank handed to collectives for it, in terms of an all-reduce.
        """


class SyncObserver(ABC):
    """Observes every bucket that becomes ready."""

    @abstractmethod
    def ready(self, bucket: BucketInfo) -> BucketSync:
        """All gradients of a bucket are there; called in backward, bucket by bucket.

        Returns:
            The observer of this bucket's sync.
        """


class Observers(SyncObserver):
    """Several observers as one; false while there is none."""

    def __init__(self) -> None:
        self._observers: list[SyncObserver] = []

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __iter__(self) -> Iterator[SyncObserver]:
        return iter(self._observers)

    def add(self, observer: SyncObserver) -> None:
        if observer not in self._observers:
            self._observers.append(observer)

    def remove(self, observer: SyncObserver) -> None:
        if observer in self._observers:
            self._observers.remove(observer)

    def ready(self, bucket: BucketInfo) -> BucketSync:
        if len(self._observers) == 1:
            return self._observers[0].ready(bucket)
        return BucketSyncs([observer.ready(bucket) for observer in self._observers])


class BucketSyncs(BucketSync):
    """Several syncs as one: of several observers, or of several buckets that travel together.

    Args:
        syncs: that every call is passed on to.
    """

    def __init__(self, syncs: list[BucketSync]) -> None:
        self._syncs = syncs

    def start(self) -> None:
        for sync in self._syncs:
            sync.start()

    def send(self) -> None:
        for sync in self._syncs:
            sync.send()

    def arrive(self) -> None:
        for sync in self._syncs:
            sync.arrive()

    def end(self, wire_bytes: int) -> None:
        for sync in self._syncs:
            sync.end(wire_bytes)
