"""The buckets that DDP makes of a workload's gradients under a plan, and the caps that make given buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_commopt.compressors import Layout
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.plan import CommPlan

MIB = 2**20
_DEFAULT_CAPS = (MIB, 25 * MIB)
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Buckets = tuple[tuple[Gradient, ...], ...]


def buckets_of(plan: CommPlan, gradients: Sequence[Gradient]) -> Buckets:
    """Returns DDP's buckets once it has laid them out anew: in the order in which gradients become ready.

    Args:
        plan: its ``bucket_cap_mb`` and ``find_unused_parameters`` count; the latter keeps DDP's first layout, in the
            reverse order of definition, which is taken to be that of ``gradients``.
        gradients: in the order in which they become ready.

    Source: torch, ``compute_bucket_assignment_by_size``: a bucket is closed once it has reached its cap.
    """
    caps = bucket_caps(plan)
    if plan.find_unused_parameters:
        return tuple(tuple(reversed(bucket)) for bucket in reversed(_assign(list(reversed(gradients)), caps)))
    return _assign(gradients, caps)


def bucket_caps(plan: CommPlan) -> tuple[int, ...]:
    """Returns the bytes that close a bucket; the last one holds for all that follow."""
    caps = plan.bucket_cap_mb
    if caps is None:
        return _DEFAULT_CAPS
    return tuple(int(cap * MIB) for cap in (caps if isinstance(caps, Sequence) else (caps,)))


def _assign(gradients: Iterable[Gradient], caps: Sequence[int]) -> Buckets:
    buckets: list[tuple[Gradient, ...]] = []
    unfinished: dict[int, list[Gradient]] = {}
    num_closed: dict[int, int] = {}
    for gradient in gradients:
        bucket = unfinished.setdefault(gradient.itemsize, [])
        bucket.append(gradient)
        closed = num_closed.get(gradient.itemsize, 0)
        if sum(member.num_bytes for member in bucket) >= caps[min(closed, len(caps) - 1)]:
            buckets.append(tuple(unfinished.pop(gradient.itemsize)))
            num_closed[gradient.itemsize] = closed + 1
    return (*buckets, *map(tuple, unfinished.values()))


def caps_for(sizes: Sequence[int], gradients: Sequence[Gradient]) -> tuple[float, ...]:
    """Returns the ``bucket_cap_mb`` list for buckets of so many gradients each, all of one dtype.

    >>> two = [Gradient(name, (256, 1024), 4, 0.1) for name in "ab"]
    >>> caps_for((1, 1), two), caps_for((2,), two)
    ((1.0, 1.0), (2.0,))
    """
    caps, start = [], 0
    for size in sizes:
        caps.append(sum(gradient.num_bytes for gradient in gradients[start : start + size]) / MIB)
        start += size
    return tuple(caps)


def layout_of(bucket: Sequence[Gradient]) -> Layout:
    """Returns what a compressor needs to know of a bucket, whose gradients are taken to be contiguous."""
    strides = []
    for gradient in bucket:
        stride, size = [], 1
        for length in reversed(gradient.shape):
            stride.append(size)
            size *= length
        strides.append(tuple(reversed(stride)))
    dtype = _DTYPES.get(bucket[0].itemsize, torch.float32)
    return Layout(tuple(torch.Size(gradient.shape) for gradient in bucket), tuple(strides), dtype)
