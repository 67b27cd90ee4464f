"""What a hook tells of its exchanges, to whoever asked: recorders, NVTX ranges."""

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
    """One bucket on its way; told of what happens to it in the order of these methods, on any thread.

    For CUDA tensors the stream in which it happens is the current one, and the host may be far ahead of it. Rounds
    are pairs of `send` and `arrive`. After an exchange that failed nothing more comes.
    """

    __slots__ = ()

    @abstractmethod
    def start(self) -> None:
        """The bucket's turn has come: it is being compressed, or sent."""

    @abstractmethod
    def send(self) -> None:
        """A message has been handed to the collective, or the first of several that overlap."""

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
    """Is told of every bucket that becomes ready."""

    @abstractmethod
    def ready(self, bucket: BucketInfo) -> BucketSync:
        """All gradients of a bucket are there; called in backward, bucket by bucket.

        Returns:
            Who wants to be told how it goes on.
        """


class Observers(SyncObserver):
    """Several observers as one; false as long as there is none."""

    def __init__(self) -> None:
        self._observers: list[SyncObserver] = []

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._observers)

    def __iter__(self) -> Iterator[SyncObserver]:
        """Gives them one after another."""
        return iter(self._observers)

    def add(self, observer: SyncObserver) -> None:
        """Adds one, unless it is there already."""
        if observer not in self._observers:
            self._observers.append(observer)

    def remove(self, observer: SyncObserver) -> None:
        """Removes one, if it is there."""
        if observer in self._observers:
            self._observers.remove(observer)

    def ready(self, bucket: BucketInfo) -> BucketSync:
        """Tells all of them."""
        if len(self._observers) == 1:
            return self._observers[0].ready(bucket)
        return BucketSyncs([observer.ready(bucket) for observer in self._observers])


class BucketSyncs(BucketSync):
    """The same exchange as several observers see it, or the exchanges of several buckets that travel together.

    Args:
        exchanges: to be told.
    """

    def __init__(self, exchanges: list[BucketSync]) -> None:
        self._exchanges = exchanges

    def start(self) -> None:
        """Tells all of them."""
        for exchange in self._exchanges:
            exchange.start()

    def send(self) -> None:
        """Tells all of them."""
        for exchange in self._exchanges:
            exchange.send()

    def arrive(self) -> None:
        """Tells all of them."""
        for exchange in self._exchanges:
            exchange.arrive()

    def end(self, wire_bytes: int) -> None:
        """Tells all of them."""
        for exchange in self._exchanges:
            exchange.end(wire_bytes)
