"""Rounding of blocks in plain torch: what `blockwise` computes, a chunk of blocks at a time.

Shapes: as there; ``k`` blocks in a chunk, ``C`` bytes in the codes of a block.
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
    MIN_SCALE,
    ROUNDING_MAGIC,
    BlockFormat,
    Parts,
)
from lightning_commopt.compressors.kernels.elementwise import CHUNK_NUMEL


class Rounded(NamedTuple):
    """Blocks after rounding, which decode to ``levels * scales``.

    Attributes:
        codes: ``(k, C)`` int8, as they travel.
        levels: ``(k, B)`` float32, what the codes stand for.
        scales: ``(k, 1)`` float32; not finite where a block is not.
    """

    codes: Tensor
    levels: Tensor
    scales: Tensor


def round_blocks(blocks: Tensor, block_format: BlockFormat, out: Tensor | None = None) -> Rounded:
    """Rounds ``blocks`` ``(k, B)``, float32, as in the docstring of `blockwise`; the levels are in ``out``."""
    scales, inverse = _find_scales(blocks, block_format)
    row = blocks.new_empty(1, block_format.block_size)  # addcmul is fast, and rounds once, with a row as its first
    if block_format.bits == 8:
        rounded = torch.addcmul(row.fill_(ROUNDING_MAGIC), blocks, inverse, out=out)
        codes = rounded.view(torch.int32).to(torch.int8)
        return Rounded(codes, rounded.sub_(ROUNDING_MAGIC), scales)
    squares = torch.addcmul(row.fill_(INT4_OFFSET), blocks.abs(), inverse, out=out)
    # In float32 the root of torch's vector library is off by one bit for some numbers.
    rounded = squares.copy_(squares.double().sqrt_()).sub_(INT4_CURVE / 2).copysign_(blocks).mul_(scales.sign())
    first, second = rounded.clamp_max_(MAX_CODE_4).add_(ROUNDING_MAGIC).view(torch.int32).chunk(2, dim=1)
    codes = ((first & 15) | (second << 4)).to(torch.int8)
    return Rounded(codes, _level(rounded.sub_(ROUNDING_MAGIC)), scales)


def _find_scales(blocks: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Returns the scales ``(k, 1)``, and the inverses of their magnitudes."""
    # The largest magnitude by two passes that write nothing: abs().amax() is slower, vector_norm(ord=inf) ten times.
    highest, lowest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    top = torch.maximum(highest, -lowest)
    scales = (top * block_format.scale_of_top).clamp_min_(MIN_SCALE)
    if block_format.bits == 8:
        return scales * top.sign(), scales.reciprocal()
    cut = (scales.view(torch.int32) & -0x10000).view(torch.float32)  # to bfloat16
    scales = torch.where(top < torch.inf, cut, top)
    is_turned = (highest >= -lowest) & (top > 0) & (top < torch.inf)
    return torch.where(is_turned, -scales, scales) * top.sign(), scales.reciprocal()


def _level(codes: Tensor) -> Tensor:
    """Returns what 4-bit ``codes`` stand for, in place."""
    return codes.mul_(codes.abs().add_(INT4_CURVE))


def read_levels(codes: Tensor, block_format: BlockFormat) -> Tensor:
    """Returns what ``codes`` ``(k, C)``, int8, stand for, before the scale: ``(k, B)`` float32."""
    if block_format.bits == 8:
        return codes.float()
    return _level(torch.cat([(codes << 4) >> 4, codes >> 4], dim=1).float())


def chunks(parts: Parts, block_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Goes through all blocks of a message, a chunk at a time.

    Yields:
        Which elements of the bucket come next, filled up, their codes ``(k, C)`` and their scales ``(k,)``.
    """
    start, num_blocks = 0, max(CHUNK_NUMEL // block_size, 1)
    for row_codes, row_scales in zip(*parts, strict=True):
        for codes, scales in zip(row_codes.split(num_blocks), row_scales.split(num_blocks), strict=True):
            yield slice(start, start + len(codes) * block_size), codes, scales
            start += len(codes) * block_size


def new_chunks(num: int, parts: Parts, block_size: int) -> Tensor:
    """Returns memory for chunks in float32, ``(num, k, B)``: fresh memory for each would cost as much as arithmetic."""
    num_blocks = min(max(CHUNK_NUMEL // block_size, 1), parts.scales.shape[1])
    return torch.empty(num, num_blocks, block_size, dtype=torch.float32, device=parts.codes.device)


def fill(part: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``part + residual`` in ``out`` ``(k, B)``, float32, filled up with zeros."""
    values, rest = out.view(-1).tensor_split([part.numel()])
    rest.zero_()
    if residual is None:
        values.copy_(part)
    else:
        torch.add(part.float(), residual, out=values)
    return out


def average_shares(shares: Parts, elements: slice, block_format: BlockFormat) -> Tensor:
    """Returns the mean over ranks of these elements of a shard, ``(k, B)``."""
    blocks = slice(elements.start // block_format.block_size, elements.stop // block_format.block_size)
    weights = shares.scales[:, blocks].float().div(len(shares.scales)).unsqueeze(2)
    mean = read_levels(shares.codes[0, blocks], block_format).mul_(weights[0])
    for codes, weight in zip(shares.codes[1:, blocks], weights[1:], strict=True):
        mean.addcmul_(read_levels(codes, block_format), weight)
    return mean


def put_rest(blocks: Tensor, rounded: Rounded, residual: Tensor) -> None:
    """Writes what rounding has left out of ``blocks`` to ``residual``, but for blocks that are not finite."""
    is_whole = residual.dtype == blocks.dtype and residual.numel() == blocks.numel()
    if is_whole and rounded.scales.amax().isfinite():
        torch.addcmul(blocks, rounded.levels, rounded.scales, value=-1, out=residual.view_as(blocks))
    else:
        put_finite(blocks.addcmul(rounded.levels, rounded.scales, value=-1), rounded.scales, residual)


def put_finite(blocks: Tensor, scales: Tensor, residual: Tensor) -> None:
    """Writes ``blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, but for blocks that are not finite."""
    values = blocks.view(-1)[: residual.numel()]
    if not scales.amax().isfinite():
        finite = scales.view(-1).isfinite().repeat_interleave(blocks.shape[1])[: residual.numel()]
        values = torch.where(finite, values, residual)
    residual.copy_(values)


def add_finite(blocks: Tensor, scales: Tensor, residual: Tensor, factor: float) -> None:
    """Adds ``factor * blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, but for blocks that are not finite."""
    if not scales.amax().isfinite():
        blocks = blocks.masked_fill(~scales.view(-1, 1).isfinite(), 0)
    values = blocks.view(-1)[: residual.numel()]
    if residual.dtype == torch.float32:
        residual.add_(values, alpha=factor)
    else:
        residual.copy_((values * factor).add_(residual))
