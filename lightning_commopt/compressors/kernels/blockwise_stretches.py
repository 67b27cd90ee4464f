"""The arithmetic of `blockwise` in plain torch, on a stretch of blocks at a time.

Shapes: as there; ``k`` blocks in a stretch, ``C`` bytes in the codes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels.blockwise_format import (
    INT4_CURVE,
    INT4_OFFSET,
    MAX_CODE_4,
    ROUNDING_MAGIC,
    SMALLEST_SCALE,
    BlockFormat,
    Parts,
)

# Measured on one core with 1 MiB of second-level and 32 MiB of shared cache, where a call costs 1 to 3 us: parts that
# fit the smaller cache cost more in calls than they save. The dozen calls on scales are made once a stretch.
STRETCH_NUMEL = 2**20
CHUNK_NUMEL = 2**19


class Scratch(NamedTuple):
    """Memory for one call, in float32.

    Attributes:
        stretch: ``(stretch / B, B)``.
        chunk: ``(chunk / B, B)``.
        scale: ``(stretch / B,)``.
        inverse: ``(stretch / B,)``.
        lowest: ``(stretch / B,)``.
    """

    stretch: Tensor
    chunk: Tensor
    scale: Tensor
    inverse: Tensor
    lowest: Tensor

    @classmethod
    def like(cls, parts: Parts, block_format: BlockFormat) -> Scratch:
        """Returns what one row of ``parts`` needs."""
        num_blocks, block_size = parts.scales.shape[1], block_format.block_size
        long, short = (min(max(numel // block_size, 1), num_blocks) for numel in (STRETCH_NUMEL, CHUNK_NUMEL))

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=parts.codes.device)

        return cls(new(long, block_size), new(short, block_size), new(long), new(long), new(long))


def stretches(parts: Parts, num_blocks: int, block_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Goes through all blocks of a message, ``k <= num_blocks`` at a time.

    Yields:
        Which elements of the bucket come next, filled up, their codes ``(k, C)`` and their scales ``(k,)``.
    """
    start = 0
    for row_codes, row_scales in zip(*parts, strict=True):
        for codes, scales in zip(row_codes.split(num_blocks), row_scales.split(num_blocks), strict=True):
            yield slice(start, start + len(codes) * block_size), codes, scales
            start += len(codes) * block_size


def is_whole(part: Tensor, shape: tuple[int, int]) -> bool:
    """Returns whether ``part`` is in float32 and fills blocks of ``shape`` ``(k, B)``."""
    return part.dtype == torch.float32 and part.numel() == shape[0] * shape[1]


def fill(part: Tensor, residual: Tensor | None, shape: tuple[int, int], scratch: Tensor) -> Tensor:
    """Returns ``part + residual`` as blocks of ``shape`` ``(k, B)``: in float32, filled up with zeros.

    It is in ``scratch``, or ``part`` itself where nothing is to be done.
    """
    if residual is None and is_whole(part, shape):
        return part.view(shape)
    blocks = scratch[: shape[0]]
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


def find_scales(block_format: BlockFormat, blocks: Tensor, scratch: Scratch) -> Tensor:
    """Returns the scale of each block ``(k,)``, in ``scratch``, where the inverses of their magnitudes are too."""
    # The largest magnitude by two passes that write nothing: abs().amax() is slower, vector_norm(ord=inf) ten times.
    scales, inverse, lowest = (x[: len(blocks)] for x in (scratch.scale, scratch.inverse, scratch.lowest))
    torch.amax(blocks, 1, out=inverse)
    torch.amin(blocks, 1, out=lowest)
    is_positive = inverse >= lowest.neg_()
    top = torch.maximum(inverse, lowest, out=lowest)
    torch.mul(top, block_format.scale_of_top, out=scales).clamp_min_(SMALLEST_SCALE)
    if block_format.bits == 4:
        scales.view(torch.int32).bitwise_and_(-0x10000)
        torch.where(top < torch.inf, scales, top, out=scales)
    torch.reciprocal(scales, out=inverse)
    scales.mul_(top.sign())
    if block_format.bits == 4:
        torch.where(is_positive & (top > 0) & (top < torch.inf), -scales, scales, out=scales)
    return scales


def write_codes(
    block_format: BlockFormat, blocks: Tensor, codes: Tensor, scales: Tensor, scratch: Scratch, rest: Tensor | None
) -> None:
    """Writes the codes of ``blocks``, and to ``rest``, which may be ``blocks``, what they leave out."""
    step = len(scratch.chunk)
    write = _write_int8 if block_format.bits == 8 else _write_int4
    columns = (x[: len(blocks)].unsqueeze(1).split(step) for x in (scratch.inverse, scales))
    for index, (chunk, code, inverse, scale) in enumerate(
        zip(blocks.split(step), codes.split(step), *columns, strict=True)
    ):
        levels = scratch.chunk[: len(chunk)]
        write(chunk, code, inverse, scale, levels)
        if rest is not None:
            torch.addcmul(chunk, levels, scale, value=-1, out=rest[index * step :][: len(chunk)])


def _write_int8(blocks: Tensor, codes: Tensor, inverse: Tensor, scale: Tensor, levels: Tensor) -> None:
    magic = levels.new_full((1, levels.shape[1]), ROUNDING_MAGIC)
    torch.addcmul(magic, blocks, inverse, out=levels)
    codes.copy_(levels.view(torch.int32))
    levels.copy_(codes)


def _write_int4(blocks: Tensor, codes: Tensor, inverse: Tensor, scale: Tensor, levels: Tensor) -> None:
    offset = levels.new_full((1, levels.shape[1]), INT4_OFFSET)
    torch.addcmul(offset, torch.abs(blocks, out=levels), inverse, out=levels)
    # In float32 the root of torch's vector library is off by one bit for some numbers.
    levels.copy_(levels.double().sqrt_()).sub_(INT4_CURVE / 2)
    torch.copysign(levels, blocks, out=levels).mul_(scale.sign())
    levels.clamp_max_(MAX_CODE_4).add_(ROUNDING_MAGIC)
    first, second = levels.view(torch.int32).chunk(2, dim=1)
    codes.copy_((first & 15) | (second << 4))
    levels.sub_(ROUNDING_MAGIC)
    levels.mul_(levels.abs().add_(INT4_CURVE))


def read_levels(block_format: BlockFormat, codes: Tensor, out: Tensor) -> Tensor:
    """Returns what ``codes`` ``(k, C)`` stand for, before the scale, in ``out`` ``(k, B)``."""
    if block_format.bits == 8:
        return out.copy_(codes)
    first, second = out.chunk(2, dim=1)
    first.copy_((codes << 4) >> 4)
    second.copy_(codes >> 4)
    return out.mul_(out.abs().add_(INT4_CURVE))


def average_shares(block_format: BlockFormat, shares: Parts, elements: slice, scratch: Scratch) -> Tensor:
    """Returns the mean over ranks of these elements of a shard, ``(k, B)``, in ``scratch.stretch``."""
    world_size, block_size = len(shares.codes), block_format.block_size
    blocks = slice(elements.start // block_size, elements.stop // block_size)
    step = len(scratch.chunk)
    all_codes = shares.codes[:, blocks].split(step, dim=1)
    all_weights = shares.scales[:, blocks].float().div(world_size).unsqueeze(2).split(step, dim=1)
    mean = scratch.stretch[: blocks.stop - blocks.start]
    for total, codes, weights in zip(mean.split(step), all_codes, all_weights, strict=True):
        read_levels(block_format, codes[0], total).mul_(weights[0])
        share = scratch.chunk[: len(total)]
        for rank in range(1, world_size):
            total.addcmul_(read_levels(block_format, codes[rank], share), weights[rank])
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
