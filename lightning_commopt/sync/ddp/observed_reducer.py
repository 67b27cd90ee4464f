"""Observes the all-reduces that DDP itself issues without a comm hook, on CPU and from torch 2.14 on."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.collectives import has_collective_hooks, listen
from lightning_commopt.compat.torch import (
    bucket_parameters,
    call_after_all_reduces,
    first_bucket_parameters,
    has_bucket_limits,
    is_in_backward,
    refresh_bucket_parameters,
    uses_python_reducer,
)
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo, BucketSync, Observers
from lightning_commopt.sync.ddp.buckets import sparse_parameters, synced_parameters


def can_observe_reducer(model: DistributedDataParallel) -> bool:
    """Returns whether `ObservedReducer` can observe a model's buckets: they must be dense, and travel over gloo."""
    return (
        has_collective_hooks()
        and model.device_type == "cpu"
        and "gloo" in dist.get_backend(model.process_group)
        and has_bucket_limits(model)
        and not uses_python_reducer(model)
        and not sparse_parameters(model)
    )


class ObservedReducer:
    """Notifies observers when DDP's all-reduces are issued and when they end, without changing what DDP does.

    DDP all-reduces its buckets in order. An all-reduce within a backward is attributed to the next bucket if it has
    that bucket's size. In the first backward of a static graph, the all-reduces may come after the backward. Backward
    waits for all of them, so at its end all have ended: the thread that reports an end may get the GIL later than the
    thread that has waited for it.

    `before_backward` must be called before every backward. The ``model`` was just wrapped, without a hook, and is not
    kept alive.
    """

    def __init__(self, model: DistributedDataParallel, observers: Observers) -> None:
        self._model = weakref.ref(model)
        self._observers = observers
        synced = synced_parameters(model)
        self._names, self._sizes = list(synced), [parameter.nbytes for parameter in synced.values()]
        self._buckets = self._infos(first_bucket_parameters(model, list(synced.values())))
        self._is_settled = False
        self._may_be_late = model.static_graph
        self._next: int | None = None
        self._open: list[_IssuedBucket] = []
        remove = listen(model.process_group, self._issue, sees_end=True)
        weakref.finalize(model, remove).atexit = False

    def before_backward(self) -> None:
        """Prepares for the buckets of a backward."""
        model = self._model()
        if model is not None and not self._is_settled and self._observers:
            refresh_bucket_parameters(model)
            rebuilt = bucket_parameters(model)
            if rebuilt:
                self._buckets = self._infos(rebuilt)
            self._is_settled = bool(rebuilt) or (model.find_unused_parameters and not model.static_graph)
            self._may_be_late = model.static_graph and not rebuilt
        self._next = 0 if self._observers else None

    def _issue(self, operation: str, num_bytes: int) -> _IssuedBucket | None:
        if self._next is None or operation != "all_reduce" or not (is_in_backward() or self._may_be_late):
            return None
        bucket = self._buckets[self._next]
        if bucket.gradient_bytes != num_bytes:
            return None
        self._next += 1
        if bucket.is_last:
            self._next = None
            with suppress(RuntimeError):  # a static graph's first all-reduces may come after their backward
                call_after_all_reduces(self._end)
        sync = self._observers.ready(bucket)
        sync.note(START)
        sync.note(SEND)
        self._open.append(issued := _IssuedBucket(sync, num_bytes))
        return issued

    def _end(self) -> None:
        while self._open:
            self._open.pop().end()

    def _infos(self, buckets: list[list[int]]) -> list[BucketInfo]:
        return [
            BucketInfo(
                index=index,
                gradient_bytes=sum([self._sizes[place] for place in places]),
                names=tuple([self._names[place] for place in places]),
                is_last=index == len(buckets) - 1,
            )
            for index, places in enumerate(buckets)
        ]


class _IssuedBucket:
    """A bucket whose all-reduce was issued."""

    def __init__(self, sync: BucketSync, num_bytes: int) -> None:
        self._under_way, self._num_bytes = [sync], num_bytes

    def end(self) -> None:
        """Notes the end, but only once, since two threads may call it."""
        try:
            sync = self._under_way.pop()
        except IndexError:
            return
        sync.note(ARRIVE)
        sync.note(END, self._num_bytes)
