"""The arithmetic of `block_int8` in plain torch, on a stretch of blocks at a time.

Shapes: as there; ``k`` blocks in a stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_OF_TOP = (1 / 127) * (1 - 2**-22)
SMALLEST_SCALE = 2.0**-126
ROUNDING_MAGIC = 1.5 * 2.0**23
"""Added to a small float32 it rounds it, half to even, and leaves the integer in the lowest bits."""

# Measured on one core with 1 MiB of second-level and 32 MiB of shared cache, where a call costs 1 to 3 us: parts that
# fit the smaller cache cost more in calls than they save. The dozen calls on scales are made once a stretch.
STRETCH_NUMEL = 2**20
CHUNK_NUMEL = 2**19


class Parts(NamedTuple):
    """Views of a message.

    Attributes:
        codes: ``(W, s / B, B)`` int8.
        scales: ``(W, s / B)`` float32.
    """

    codes: Tensor
    scales: Tensor


class Scratch(NamedTuple):
    """Memory for one call, in float32.

    Attributes:
        stretch: ``(stretch / B, B)``.
        chunk: ``(chunk / B, B)``.
        inverse: ``(stretch / B,)``.
        lowest: ``(stretch / B,)``.
    """

    stretch: Tensor
    chunk: Tensor
    inverse: Tensor
    lowest: Tensor

    @classmethod
    def like(cls, parts: Parts) -> Scratch:
        """Returns what one row of ``parts`` needs."""
        _, num_blocks, block_size = parts.codes.shape
        long, short = (min(max(numel // block_size, 1), num_blocks) for numel in (STRETCH_NUMEL, CHUNK_NUMEL))
        new = parts.scales.new_empty
        return cls(new(long, block_size), new(short, block_size), new(long), new(long))


def stretches(parts: Parts, num_blocks: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Goes through all blocks of a message, ``k <= num_blocks`` at a time.

    Yields:
        Which elements of the bucket come next, filled up, their codes ``(k, B)`` and their scales ``(k,)``.
    """
    start = 0
    for row_codes, row_scales in zip(*parts, strict=True):
        for codes, scales in zip(row_codes.split(num_blocks), row_scales.split(num_blocks), strict=True):
            yield slice(start, start + codes.numel()), codes, scales
            start += codes.numel()


def is_whole(part: Tensor, codes: Tensor) -> bool:
    """Returns whether ``part`` is in float32 and has an element for each of ``codes``."""
    return part.dtype == torch.float32 and part.numel() == codes.numel()


def fill(part: Tensor, owed: Tensor | None, codes: Tensor, scratch: Tensor) -> Tensor:
    """Returns ``part + owed`` as ``codes`` ``(k, B)`` needs it: in float32, filled up with zeros.

    It is in ``scratch``, or ``part`` itself where nothing is to be done.
    """
    if owed is None and is_whole(part, codes):
        return part.view(codes.shape)
    blocks = scratch[: len(codes)]
    values, filling = blocks.view(-1).tensor_split([part.numel()])
    filling.zero_()
    if owed is None:
        values.copy_(part)
    elif part.dtype == owed.dtype == torch.float32:
        torch.add(part, owed, out=values)
    elif part.dtype == torch.float32:
        values.copy_(owed).add_(part)
    else:
        values.copy_(part).add_(owed)
    return blocks


def find_scales(blocks: Tensor, scales: Tensor, scratch: Scratch) -> None:
    """Writes the scale of each block to ``scales`` and its inverse to ``scratch.inverse``."""
    # The largest magnitude by two passes that write nothing: abs().amax() is slower, vector_norm(ord=inf) ten times.
    inverse, lowest = scratch.inverse[: len(blocks)], scratch.lowest[: len(blocks)]
    torch.amax(blocks, 1, out=inverse)
    torch.amin(blocks, 1, out=lowest)
    top = torch.maximum(inverse, lowest.neg_(), out=lowest)
    torch.mul(top, SCALE_OF_TOP, out=scales).clamp_min_(SMALLEST_SCALE)
    torch.reciprocal(scales, out=inverse)
    scales.mul_(top.sign_())


def write_codes(blocks: Tensor, codes: Tensor, scales: Tensor, scratch: Scratch, rest: Tensor | None) -> None:
    """Writes the codes of ``blocks``, and to ``rest``, which may be ``blocks``, what they leave out."""
    step = len(scratch.chunk)
    magic = scratch.chunk.new_full((1, blocks.shape[1]), ROUNDING_MAGIC)
    inverses = scratch.inverse[: len(blocks)].unsqueeze(1).split(step)
    columns = scales.unsqueeze(1).split(step)
    for index, (chunk, code, inverse) in enumerate(zip(blocks.split(step), codes.split(step), inverses, strict=True)):
        rounded = scratch.chunk[: len(chunk)]
        torch.addcmul(magic, chunk, inverse, out=rounded)
        code.copy_(rounded.view(torch.int32))
        if rest is not None:
            torch.addcmul(chunk, rounded.copy_(code), columns[index], value=-1, out=rest[index * step :][: len(chunk)])


def average_shares(shares: Parts, elements: slice, scratch: Scratch) -> Tensor:
    """Returns the mean over ranks of these elements of a shard, ``(k, B)``, in ``scratch.stretch``."""
    world_size, _, block_size = shares.codes.shape
    blocks = slice(elements.start // block_size, elements.stop // block_size)
    step = len(scratch.chunk)
    all_codes = shares.codes[:, blocks].split(step, dim=1)
    all_weights = shares.scales[:, blocks].div(world_size).unsqueeze(2).split(step, dim=1)
    mean = scratch.stretch[: blocks.stop - blocks.start]
    for total, codes, weights in zip(mean.split(step), all_codes, all_weights, strict=True):
        total.copy_(codes[0]).mul_(weights[0])
        share = scratch.chunk[: len(total)]
        for rank in range(1, world_size):
            total.addcmul_(share.copy_(codes[rank]), weights[rank])
    return mean


def put_finite(blocks: Tensor, scales: Tensor, owed: Tensor) -> None:
    """Writes ``blocks`` ``(k, B)`` to ``owed`` ``(<= k B,)``, but for blocks that are not finite."""
    values = blocks.view(-1)[: owed.numel()]
    if not scales.amax().isfinite():
        finite = scales.isfinite().repeat_interleave(blocks.shape[1])[: owed.numel()]
        values = torch.where(finite, values, owed)
    owed.copy_(values)


def add_finite(blocks: Tensor, scales: Tensor, owed: Tensor, factor: float) -> None:
    """Adds ``factor * blocks`` ``(k, B)`` to ``owed`` ``(<= k B,)``, but for blocks that are not finite."""
    if not scales.amax().isfinite():
        blocks.masked_fill_(scales.isfinite().logical_not_().unsqueeze(1), 0)
    values = blocks.view(-1)[: owed.numel()]
    if owed.dtype == torch.float32:
        owed.add_(values, alpha=factor)
    else:
        owed.copy_(values.mul_(factor).add_(owed))
