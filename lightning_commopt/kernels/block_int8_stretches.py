"""The arithmetic of `block_int8` in plain torch, on a stretch of blocks at a time.

Shapes: as there; ``k`` blocks in a stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.kernels.int8_message import ROUNDING_MAGIC, SCALE_OF_TOP, SMALLEST_SCALE, Parts

# Measured on one core with 1 MiB of second-level and 32 MiB of shared cache, where a call costs 1 to 3 us: parts that
# fit the smaller cache cost more in calls than they save. The dozen calls on scales are made once a stretch.
STRETCH_NUMEL = 2**20
CHUNK_NUMEL = 2**19


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


def fill(part: Tensor, residual: Tensor | None, codes: Tensor, scratch: Tensor) -> Tensor:
    """Returns ``part + residual`` as ``codes`` ``(k, B)`` needs it: in float32, filled up with zeros.

    It is in ``scratch``, or ``part`` itself where nothing is to be done.
    """
    if residual is None and is_whole(part, codes):
        return part.view(codes.shape)
    blocks = scratch[: len(codes)]
    values, filling = blocks.view(-1).tensor_split([part.numel()])
    filling.zero_()
    if residual is None:
        values.copy_(part)
    elif part.dtype == residual.dtype == torch.float32:
        torch.add(part, residual, out=values)
    elif part.dtype == torch.float32:
        values.copy_(residual).add_(part)
    else:
        values.copy_(part).add_(residual)
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


def put_finite(blocks: Tensor, scales: Tensor, residual: Tensor) -> None:
    """Writes ``blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, but for blocks that are not finite."""
    values = blocks.view(-1)[: residual.numel()]
    if not scales.amax().isfinite():
        finite = scales.isfinite().repeat_interleave(blocks.shape[1])[: residual.numel()]
        values = torch.where(finite, values, residual)
    residual.copy_(values)


def add_finite(blocks: Tensor, scales: Tensor, residual: Tensor, factor: float) -> None:
    """Adds ``factor * blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, but for blocks that are not finite."""
    if not scales.amax().isfinite():
        blocks.masked_fill_(scales.isfinite().logical_not_().unsqueeze(1), 0)
    values = blocks.view(-1)[: residual.numel()]
    if residual.dtype == torch.float32:
        residual.add_(values, alpha=factor)
    else:
        residual.copy_(values.mul_(factor).add_(residual))
