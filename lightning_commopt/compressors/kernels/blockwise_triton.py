"""The operations of `blockwise` in Triton, one kernel each; what they do is defined there.

A program works on a tile ``(TILE, H, B / H)``: whole blocks of one shard, each in as many parts as a byte has codes:
``H`` is 1 for 8 bits and 2 for 4. Where a multiplication and an addition are fused this says so (``fma``), and the
compiler may fuse no others: the numbers are those of plain torch.

Arguments of all kernels: ``codes`` and ``scales``, the parts of a message ``(W, shard_bytes)``, and ``num_blocks``, the
blocks in a row of it. Scales in bfloat16 come as int16, which all devices load. ``finite`` is a bool that is read on
the device.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Parts
from lightning_commopt.compressors.kernels.blockwise_tiles_triton import (
    add_to,
    average_tile,
    positions,
    read_tile,
    write_tile,
)

_TILE_NUMEL = 4096


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_format: BlockFormat) -> None:
    """Quantizes ``flat + residual`` to ``message``."""
    parts, added = block_format.split_for(flat, message), flat if residual is None else residual
    _launch(
        _encode,
        block_format,
        parts,
        flat,
        added,
        flat.numel(),
        K=block_format.scale_of_top,
        HAS_RESIDUAL=residual is not None,
    )


def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_format: BlockFormat) -> None:
    """Averages what was ``received`` and quantizes that to ``mean_message``."""
    shares, mean = block_format.split(received), block_format.split(mean_message)
    residual = _loadable(mean).scales if residual_shard is None else residual_shard
    numel = 0 if residual_shard is None else residual_shard.numel()
    world_size = len(shares.codes)
    _launch(
        _reduce,
        block_format,
        mean,
        *_loadable(shares),
        residual,
        numel,
        K=block_format.scale_of_top,
        WORLD_SIZE=world_size,
    )


def decode(message: Tensor, flat: Tensor, block_format: BlockFormat) -> None:
    """Decodes ``message`` into ``flat``."""
    _launch(_decode, block_format, block_format.split_for(flat, message), flat, flat.numel())


def undo(flat: Tensor, residual: Tensor, message: Tensor, finite: Tensor, block_format: BlockFormat) -> None:
    """Brings ``residual`` back, unless ``finite``."""
    _launch(_undo, block_format, block_format.split_for(flat, message), flat, residual, flat.numel(), finite)


def undo_reduce(
    received: Tensor, mean_message: Tensor, residual_shard: Tensor, finite: Tensor, block_format: BlockFormat
) -> None:
    """Takes back what `reduce` added, unless ``finite``."""
    shares, mean = block_format.split(received), block_format.split(mean_message)
    numel, world_size = residual_shard.numel(), len(shares.codes)
    args = (*_loadable(shares), residual_shard, numel, finite)
    _launch(_undo_reduce, block_format, mean, *args, WORLD_SIZE=world_size)


def _loadable(parts: Parts) -> Parts:
    return parts if parts.scales.dtype == torch.float32 else Parts(parts.codes, parts.scales.view(torch.int16))


def _launch(kernel: Any, block_format: BlockFormat, parts: Parts, *args: Any, **flags: float) -> None:
    """Runs ``kernel`` over all blocks of ``parts``."""
    world_size, num_blocks = parts.scales.shape
    bits, block_size = block_format
    tile = max(_TILE_NUMEL // block_size, 1)
    constants = {"B": block_size, "H": 8 // bits, "TILE": tile}
    with torch.cuda.device_of(parts.codes):
        kernel[triton.cdiv(num_blocks, tile), world_size](
            *_loadable(parts), num_blocks, *args, **flags, **constants, num_warps=8, enable_fp_fusion=False
        )


@triton.jit
def _encode(
    codes,
    scales,
    num_blocks,
    flat,
    residual,
    numel,
    K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks, elements, inside = positions(num_blocks, numel, TILE, B, H)
    c = tl.load(flat + elements, inside, 0).to(tl.float32)
    if HAS_RESIDUAL:
        c += tl.load(residual + elements, inside, 0).to(tl.float32)
    rest, finite = write_tile(c, codes, scales, blocks, num_blocks, K, TILE, B, H)
    if HAS_RESIDUAL:
        tl.store(residual + elements, rest.to(residual.dtype.element_ty), inside & finite)


@triton.jit
def _reduce(
    codes,
    scales,
    num_blocks,
    all_codes,
    all_scales,
    residual,
    numel,
    K: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks, elements, inside = positions(num_blocks, numel, TILE, B, H)
    mean = average_tile(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B, H)
    rest, finite = write_tile(mean, codes, scales, blocks, num_blocks, K, TILE, B, H)
    add_to(residual, elements, rest * WORLD_SIZE, inside & finite)


@triton.jit
def _decode(codes, scales, num_blocks, flat, numel, B: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    blocks, elements, inside = positions(num_blocks, numel, TILE, B, H)
    level, scale = read_tile(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
    tl.store(flat + elements, (level * scale).to(flat.dtype.element_ty), inside)


@triton.jit
def _undo(
    codes,
    scales,
    num_blocks,
    flat,
    residual,
    numel,
    finite,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.load(finite) == 0:
        blocks, elements, inside = positions(num_blocks, numel, TILE, B, H)
        level, scale = read_tile(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
        inside = inside & (scale < float("inf"))
        values = tl.load(flat + elements, inside, 0).to(tl.float32)
        kept = tl.load(residual + elements, inside, 0).to(tl.float32)
        kept = level * scale + kept - values
        tl.store(residual + elements, kept.to(residual.dtype.element_ty), inside)


@triton.jit
def _undo_reduce(
    codes,
    scales,
    num_blocks,
    all_codes,
    all_scales,
    residual,
    numel,
    finite,
    WORLD_SIZE: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.load(finite) == 0:
        blocks, elements, inside = positions(num_blocks, numel, TILE, B, H)
        mean = average_tile(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B, H)
        level, scale = read_tile(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
        rest = tl.fma(-level, tl.broadcast_to(scale, (TILE, H, B // H)), mean)
        add_to(residual, elements, rest * -WORLD_SIZE, inside & (scale < float("inf")))
