"""The buckets into which DDP puts gradients, as predictions need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

import torch

from lightning_commopt.compressors import Layout
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.plan import CommPlan

MIB = 2**20
"""DDP counts its caps in this unit."""

_DEFAULT_CAPS_MIB = (1, 25)
"""DDP's own caps: 1 MiB for the first bucket, so that gradient sync begins early, and 25 MiB for all others."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Buckets = tuple[tuple[Gradient, ...], ...]


def buckets_of(plan: CommPlan, gradients: Sequence[Gradient]) -> Buckets:
    """Returns DDP's buckets after it has rebuilt them in the order in which gradients become ready.

    ``find_unused_parameters`` keeps DDP's first layout, in the reverse order of definition, which is assumed to be the
    order of ``gradients``.

    Source: torch, ``compute_bucket_assignment_by_size``: a bucket is closed once it has reached its cap.
    """
    mib = _DEFAULT_CAPS_MIB if plan.bucket_cap_mb is None else plan.bucket_cap_mb
    caps = [int(cap * MIB) for cap in (mib if isinstance(mib, Sequence) else (mib,))]
    if plan.find_unused_parameters:
        return tuple(tuple(reversed(bucket)) for bucket in reversed(_assign(list(reversed(gradients)), caps)))
    return _assign(gradients, caps)


def _assign(gradients: Iterable[Gradient], caps: Sequence[int]) -> Buckets:
    """Returns the buckets in the order in which they are closed; the last cap holds for all that follow."""
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


def layout_of(bucket: Sequence[Gradient]) -> Layout:
    """Returns what a compressor needs to know of a bucket, whose gradients are assumed to be contiguous."""
    shapes = tuple(torch.Size(gradient.shape) for gradient in bucket)
    strides = tuple(tuple(accumulate(reversed(shape), mul, initial=1))[-2::-1] for shape in shapes)
    return Layout(shapes, strides, _DTYPES.get(bucket[0].itemsize, torch.float32))
