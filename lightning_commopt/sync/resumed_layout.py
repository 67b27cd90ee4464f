"""Replays the checkpoint's bucket layout until DDP rebuilds its own.

DDP rebuilds its buckets after one iteration, or two with a static graph; a checkpoint has the states of the rebuilt
ones. In other buckets the limits of blocks and the order of sums differ: not the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_commopt.compressors import Layout
from lightning_commopt.measure.observer import BucketSync, BucketSyncs
from lightning_commopt.sync.executors import BucketFuture

_MAX_BACKWARDS = 3


@dataclass(frozen=True)
class Bucket:
    """One bucket of DDP or of a checkpoint: ``flat``, ``(n,)``, is both input and output; ``step`` counts from 0."""

    index: int
    flat: Tensor
    layout: Layout
    names: tuple[str, ...]
    step: int
    sync: BucketSync

    @property
    def is_compressible(self) -> bool:
        return not self.flat.is_sparse and self.flat.is_floating_point()

    def parts(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.layout.split(self.flat), strict=True))


class Relayout:
    """Holds those of DDP's buckets that differ from the checkpoint's until the last one is ready.

    Args:
        saved: names and layouts of the checkpoint's buckets, by index.
    """

    def __init__(self, saved: dict[int, tuple[tuple[str, ...], Layout]]) -> None:
        self._saved = saved
        self._held = HeldBuckets([], [], {})
        self._in_place: set[int] = set()
        self._num_backwards = 0

    def hold(self, bucket: Bucket, future: BucketFuture) -> bool:
        """Holds a bucket back, unless it can be synchronized as it is; returns whether it does."""
        if bucket.index == 0:  # an earlier backward may have been interrupted
            self._start_backward()
        if not bucket.is_compressible:
            return False
        if self._saved.get(bucket.index) == (bucket.names, bucket.layout):
            self._in_place.add(bucket.index)
            return False
        self._held.buckets.append(bucket)
        self._held.futures.append(future)
        return True

    def end_backward(self) -> HeldBuckets:
        """Returns the buckets that were held back in this backward."""
        held = self._held
        missing = {index: self._saved[index] for index in sorted(self._saved) if index not in self._in_place}
        self._num_backwards += 1
        if held.buckets and held.has_gradients_of(missing):
            held.saved.update(missing)
        else:
            self._num_backwards = _MAX_BACKWARDS
        self._start_backward()
        return held

    @property
    def is_unused(self) -> bool:
        return self._num_backwards == 0

    @property
    def is_over(self) -> bool:
        """Whether DDP has the checkpoint's buckets by now, or never will."""
        return self._num_backwards >= _MAX_BACKWARDS

    def _start_backward(self) -> None:
        self._held, self._in_place = HeldBuckets([], [], {}), set()


@dataclass(frozen=True)
class HeldBuckets:
    """DDP's buckets of one backward whose layout differs from the checkpoint's, and their futures.

    Attributes:
        saved: names and layouts of the checkpoint's buckets for the same gradients, by index; empty if the gradients
            differ.
    """

    buckets: list[Bucket]
    futures: list[BucketFuture]
    saved: dict[int, tuple[tuple[str, ...], Layout]]

    def has_gradients_of(self, saved: dict[int, tuple[tuple[str, ...], Layout]]) -> bool:
        here = [gradient for bucket in self.buckets for gradient in _gradients(bucket.names, bucket.layout)]
        there = [gradient for names, layout in saved.values() for gradient in _gradients(names, layout)]
        return sorted(here) == sorted(there)

    def laid_out_as_saved(self) -> Iterator[Bucket]:
        """Yields the checkpoint's buckets; each is copied back into DDP's when the next one is requested."""
        gradients = {name: part for bucket in self.buckets for name, part in bucket.parts().items()}
        for index, (names, layout) in self.saved.items():
            bucket = replace(
                self.buckets[0],
                index=index,
                flat=torch.empty(layout.numel, dtype=layout.dtype, device=self.buckets[0].flat.device),
                layout=layout,
                names=names,
                sync=BucketSyncs([]),
            )
            for name, part in bucket.parts().items():
                part.copy_(gradients[name])
            yield bucket
            for name, part in bucket.parts().items():
                gradients[name].copy_(part)


def _gradients(names: tuple[str, ...], layout: Layout) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns name, shape and dtype of each gradient."""
    return [(name, tuple(shape), str(layout.dtype)) for name, shape in zip(names, layout.shapes, strict=True)]
