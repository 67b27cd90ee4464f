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

from lightning_commopt.compressors.kernels.blockwise_format import (
    INT4_CURVE,
    INT4_OFFSET,
    MAX_CODE_4,
    ROUNDING_MAGIC,
    SMALLEST_SCALE,
    BlockFormat,
    Parts,
)
from lightning_commopt.compressors.kernels.division_triton import inverse_of, over_ranks

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_MAGIC = tl.constexpr(ROUNDING_MAGIC)
_CURVE = tl.constexpr(INT4_CURVE)
_OFFSET = tl.constexpr(INT4_OFFSET)
_MAX_CODE_4 = tl.constexpr(MAX_CODE_4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_UPPER_HALF = tl.constexpr(-0x10000)
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
def _positions(num_blocks, numel, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Returns which of the row's blocks, and which elements of the bucket, are in this program's tile."""
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = (tl.program_id(1).to(tl.int64) * num_blocks + blocks) * B
    within = tl.arange(0, H)[:, None] * (B // H) + tl.arange(0, B // H)[None, :]
    elements = first[:, None, None] + within[None, :, :]
    return blocks, elements, (blocks < num_blocks)[:, None, None] & (elements < numel)


@triton.jit
def _places(row, blocks, num_blocks, B: tl.constexpr, H: tl.constexpr):
    """Returns where codes ``(TILE, 1, B / H)`` and scales ``(TILE,)`` of blocks in this ``row`` of a message are."""
    scale_bytes: tl.constexpr = 4 // H
    start = row.to(tl.int64) * num_blocks * (B // H + scale_bytes)
    codes = start + blocks[:, None, None] * (B // H) + tl.arange(0, B // H)[None, None, :]
    return codes, start // scale_bytes + blocks


@triton.jit
def _level(code, H: tl.constexpr):
    """Returns what codes in float32 stand for, before the scale."""
    if H == 2:
        code = code * (tl.abs(code) + _CURVE)
    return code


@triton.jit
def _read(codes, scales, row, blocks, num_blocks, B: tl.constexpr, H: tl.constexpr):
    """Returns a tile's levels in float32 and its scales ``(TILE, 1, 1)`` from this ``row`` of a message."""
    at, its_scale = _places(row, blocks, num_blocks, B, H)
    inside = blocks < num_blocks
    code = tl.load(codes + at, inside[:, None, None], 0)
    scale = tl.load(scales + its_scale, inside, 0)
    if H == 2:
        code = (code.to(tl.int32) << (28 - 4 * tl.arange(0, H)[None, :, None])) >> 28
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return _level(code.to(tl.float32), H), scale[:, None, None]


@triton.jit
def _average(
    codes, scales, blocks, num_blocks, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr
):
    """Returns the mean ``(TILE, H, B / H)`` over the rows of a message."""
    mean = tl.zeros((TILE, H, B // H), tl.float32)
    for rank in range(WORLD_SIZE):
        level, scale = _read(codes, scales, tl.program_id(1) + rank, blocks, num_blocks, B, H)
        weight = over_ranks(scale, WORLD_SIZE, (TILE, 1, 1))
        mean = tl.fma(level, tl.broadcast_to(weight, (TILE, H, B // H)), mean)
    return mean


@triton.jit
def _largest(x):
    """Returns the largest element ``(TILE,)`` of each block."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _scale(c, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    """Returns the scales ``(TILE,)`` of blocks, and the inverses of their magnitudes."""
    # As integers magnitudes have the same order, with NaN above infinity: one maximum that loses neither.
    bits = c.to(tl.int32, bitcast=True)
    top = _largest(bits & _MAGNITUDE)
    wanted = top.to(tl.float32, bitcast=True) * K
    scale = tl.where(wanted < _SMALLEST_SCALE, _SMALLEST_SCALE, wanted)
    if H == 2:
        scale = (scale.to(tl.int32, bitcast=True) & _UPPER_HALF).to(tl.float32, bitcast=True)
        scale = tl.where(top > _INFINITE, float("nan"), scale)
        scale = tl.where(top == _INFINITE, float("inf"), scale)
    inverse = inverse_of(scale, (TILE,))
    scale = tl.where(top == 0, 0.0, scale)
    if H == 2:
        # As signed integers all negative numbers are below the positive ones.
        turned = (_largest(bits) == top) & (top < _INFINITE) & (top > 0)
        scale = tl.where(turned, -scale, scale)
    return scale, inverse


@triton.jit
def _quantize(
    c, codes, scales, blocks, num_blocks, K: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr
):
    """Writes ``c`` ``(TILE, H, B / H)`` to a message; returns what that leaves out, and which blocks are finite."""
    scale, inverse = _scale(c, K, H, TILE)
    inverse = tl.broadcast_to(inverse[:, None, None], (TILE, H, B // H))
    if H == 2:
        root = tl.sqrt_rn(tl.fma(tl.abs(c), inverse, tl.full((TILE, H, B // H), _OFFSET, tl.float32))) - _CURVE / 2
        root = tl.where((c < 0) != (scale < 0)[:, None, None], -root, root)
        rounded = tl.where(root < _MAX_CODE_4, root, _MAX_CODE_4) + _MAGIC
    else:
        rounded = tl.fma(c, inverse, tl.full((TILE, H, B // H), _MAGIC, tl.float32))
    code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    at, its_scale = _places(tl.program_id(1), blocks, num_blocks, B, H)
    inside = blocks < num_blocks
    if H == 2:
        packed = tl.sum((code.to(tl.int32) & 15) << (4 * tl.arange(0, H)[None, :, None]), 1)[:, None, :]
        tl.store(codes + at, packed.to(tl.int8), inside[:, None, None])
        tl.store(scales + its_scale, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), inside)
    else:
        tl.store(codes + at, code, inside[:, None, None])
        tl.store(scales + its_scale, scale, inside)
    wide = tl.broadcast_to(scale[:, None, None], (TILE, H, B // H))
    return tl.fma(-_level(code.to(tl.float32), H), wide, c), (scale < float("inf"))[:, None, None]


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
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B, H)
    c = tl.load(flat + elements, inside, 0).to(tl.float32)
    if HAS_RESIDUAL:
        c += tl.load(residual + elements, inside, 0).to(tl.float32)
    rest, finite = _quantize(c, codes, scales, blocks, num_blocks, K, TILE, B, H)
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
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B, H)
    mean = _average(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B, H)
    rest, finite = _quantize(mean, codes, scales, blocks, num_blocks, K, TILE, B, H)
    _add(residual, elements, rest * WORLD_SIZE, inside & finite)


@triton.jit
def _decode(codes, scales, num_blocks, flat, numel, B: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B, H)
    level, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
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
        blocks, elements, inside = _positions(num_blocks, numel, TILE, B, H)
        level, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
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
        blocks, elements, inside = _positions(num_blocks, numel, TILE, B, H)
        mean = _average(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B, H)
        level, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B, H)
        rest = tl.fma(-level, tl.broadcast_to(scale, (TILE, H, B // H)), mean)
        _add(residual, elements, rest * -WORLD_SIZE, inside & (scale < float("inf")))


@triton.jit
def _add(residual, elements, values, inside):
    """Adds ``values`` to what is ``inside`` of ``residual``."""
    kept = tl.load(residual + elements, inside, 0).to(tl.float32)
    tl.store(residual + elements, (kept + values).to(residual.dtype.element_ty), inside)
