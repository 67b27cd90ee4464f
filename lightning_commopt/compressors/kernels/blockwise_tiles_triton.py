"""Tiles of blocks in Triton: what the kernels of `blockwise_triton` load, compute and store; see there for shapes."""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN201, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from lightning_commopt.compressors.kernels.blockwise_format import (
    INT4_CURVE,
    INT4_OFFSET,
    MAX_CODE_4,
    MIN_SCALE,
    ROUNDING_MAGIC,
)
from lightning_commopt.compressors.kernels.division_triton import inverse_of, over_ranks

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAGIC = tl.constexpr(ROUNDING_MAGIC)
_CURVE = tl.constexpr(INT4_CURVE)
_OFFSET = tl.constexpr(INT4_OFFSET)
_MAX_CODE_4 = tl.constexpr(MAX_CODE_4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_UPPER_HALF = tl.constexpr(-0x10000)


@triton.jit
def positions(num_blocks, numel, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Returns which of the row's blocks, and which elements of the bucket, are in this program's tile."""
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = (tl.program_id(1).to(tl.int64) * num_blocks + blocks) * B
    within = tl.arange(0, H)[:, None] * (B // H) + tl.arange(0, B // H)[None, :]
    elements = first[:, None, None] + within[None, :, :]
    return blocks, elements, (blocks < num_blocks)[:, None, None] & (elements < numel)


@triton.jit
def offsets(row, blocks, num_blocks, B: tl.constexpr, H: tl.constexpr):
    """Returns where codes ``(TILE, 1, B / H)`` and scales ``(TILE,)`` of blocks in this ``row`` of a message are."""
    scale_bytes: tl.constexpr = 4 // H
    start = row.to(tl.int64) * num_blocks * (B // H + scale_bytes)
    codes = start + blocks[:, None, None] * (B // H) + tl.arange(0, B // H)[None, None, :]
    return codes, start // scale_bytes + blocks


@triton.jit
def level_of(code, H: tl.constexpr):
    """Returns what codes in float32 stand for, before the scale."""
    if H == 2:
        code = code * (tl.abs(code) + _CURVE)
    return code


@triton.jit
def read_tile(codes, scales, row, blocks, num_blocks, B: tl.constexpr, H: tl.constexpr):
    """Returns a tile's levels in float32 and its scales ``(TILE, 1, 1)`` from this ``row`` of a message."""
    at, its_scale = offsets(row, blocks, num_blocks, B, H)
    inside = blocks < num_blocks
    code = tl.load(codes + at, inside[:, None, None], 0)
    scale = tl.load(scales + its_scale, inside, 0)
    if H == 2:
        code = (code.to(tl.int32) << (28 - 4 * tl.arange(0, H)[None, :, None])) >> 28
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return level_of(code.to(tl.float32), H), scale[:, None, None]


@triton.jit
def average_tile(
    codes, scales, blocks, num_blocks, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr
):
    """Returns the mean ``(TILE, H, B / H)`` over the rows of a message."""
    mean = tl.zeros((TILE, H, B // H), tl.float32)
    for rank in range(WORLD_SIZE):
        level, scale = read_tile(codes, scales, tl.program_id(1) + rank, blocks, num_blocks, B, H)
        weight = over_ranks(scale, WORLD_SIZE, (TILE, 1, 1))
        mean = tl.fma(level, tl.broadcast_to(weight, (TILE, H, B // H)), mean)
    return mean


@triton.jit
def largest(x):
    """Returns the largest element ``(TILE,)`` of each block."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def find_scales(c, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    """Returns the scales ``(TILE,)`` of blocks, and the inverses of their magnitudes."""
    # As integers magnitudes have the same order, with NaN above infinity: one maximum that loses neither.
    bits = c.to(tl.int32, bitcast=True)
    top = largest(bits & _MAGNITUDE)
    wanted = top.to(tl.float32, bitcast=True) * K
    scale = tl.where(wanted < _MIN_SCALE, _MIN_SCALE, wanted)
    if H == 2:
        scale = (scale.to(tl.int32, bitcast=True) & _UPPER_HALF).to(tl.float32, bitcast=True)
        scale = tl.where(top > _INFINITE, float("nan"), scale)
        scale = tl.where(top == _INFINITE, float("inf"), scale)
    inverse = inverse_of(scale, (TILE,))
    scale = tl.where(top == 0, 0.0, scale)
    if H == 2:
        # As signed integers all negative numbers are below the positive ones.
        turned = (largest(bits) == top) & (top < _INFINITE) & (top > 0)
        scale = tl.where(turned, -scale, scale)
    return scale, inverse


@triton.jit
def write_tile(
    c, codes, scales, blocks, num_blocks, K: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr
):
    """Writes ``c`` ``(TILE, H, B / H)`` to a message; returns what that leaves out, and which blocks are finite."""
    scale, inverse = find_scales(c, K, H, TILE)
    inverse = tl.broadcast_to(inverse[:, None, None], (TILE, H, B // H))
    if H == 2:
        root = tl.sqrt_rn(tl.fma(tl.abs(c), inverse, tl.full((TILE, H, B // H), _OFFSET, tl.float32))) - _CURVE / 2
        root = tl.where((c < 0) != (scale < 0)[:, None, None], -root, root)
        rounded = tl.where(root < _MAX_CODE_4, root, _MAX_CODE_4) + _MAGIC
    else:
        rounded = tl.fma(c, inverse, tl.full((TILE, H, B // H), _MAGIC, tl.float32))
    code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    at, its_scale = offsets(tl.program_id(1), blocks, num_blocks, B, H)
    inside = blocks < num_blocks
    if H == 2:
        packed = tl.sum((code.to(tl.int32) & 15) << (4 * tl.arange(0, H)[None, :, None]), 1)[:, None, :]
        tl.store(codes + at, packed.to(tl.int8), inside[:, None, None])
        tl.store(scales + its_scale, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), inside)
    else:
        tl.store(codes + at, code, inside[:, None, None])
        tl.store(scales + its_scale, scale, inside)
    wide = tl.broadcast_to(scale[:, None, None], (TILE, H, B // H))
    return tl.fma(-level_of(code.to(tl.float32), H), wide, c), (scale < float("inf"))[:, None, None]


@triton.jit
def add_to(residual, elements, values, inside):
    """Adds ``values`` to what is ``inside`` of ``residual``."""
    kept = tl.load(residual + elements, inside, 0).to(tl.float32)
    tl.store(residual + elements, (kept + values).to(residual.dtype.element_ty), inside)
