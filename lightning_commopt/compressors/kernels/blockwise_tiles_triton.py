"""Tiles of blocks in Triton, which the kernels of `blockwise_triton` load and store; shapes are those there."""

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
from lightning_commopt.compressors.kernels.elementwise_triton import load, store

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MAGIC = tl.constexpr(ROUNDING_MAGIC)
_CURVE = tl.constexpr(INT4_CURVE)
_OFFSET = tl.constexpr(INT4_OFFSET)
_MAX_CODE_4 = tl.constexpr(MAX_CODE_4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 except the sign
_INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity, above which every magnitude is a NaN
_UPPER_HALF = tl.constexpr(-0x10000)  # the bits that a bfloat16 keeps of a float32


@triton.jit
def inverse_of(x, SHAPE: tl.constexpr):
    """Returns ``1 / x`` correctly rounded to float32, from an estimate and two steps of Newton's method in float64.

    ``tl.div_rn`` flushes subnormal numbers in some versions of Triton, and a division in float64 spills registers.
    """
    estimate = 1.0 / x
    wide, one, inverse = x.to(tl.float64), tl.full(SHAPE, 1.0, tl.float64), estimate.to(tl.float64)
    for _ in tl.static_range(2):
        inverse = tl.fma(tl.fma(-wide, inverse, one), inverse, inverse)
    return tl.where(x < float("inf"), inverse.to(tl.float32), estimate)


@triton.jit
def over_ranks(x, WORLD_SIZE: tl.constexpr, SHAPE: tl.constexpr):
    """Returns ``x / WORLD_SIZE`` correctly rounded to float32: a product with the inverse, corrected in float64."""
    wide, inverse = x.to(tl.float64), tl.full(SHAPE, 1 / WORLD_SIZE, tl.float64)
    quotient = wide * inverse
    rest = tl.fma(-quotient, tl.full(SHAPE, WORLD_SIZE, tl.float64), wide)
    return tl.where(x < float("inf"), tl.fma(rest, inverse, quotient).to(tl.float32), x)


@triton.jit
def row_at(message, row, num_blocks, ROWS_ALIGNED: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Returns pointers to the codes and to the scales of a ``row`` of a message."""
    if ROWS_ALIGNED:
        num_blocks = tl.multiple_of(num_blocks, 16)
    codes = message.to(tl.pointer_type(tl.int8)) + tl.cast(row, tl.int64) * num_blocks * (B // H + 4 // H)
    scales = codes + tl.cast(num_blocks, tl.int64) * (B // H)
    return codes, scales.to(tl.pointer_type(tl.int16)) if H == 2 else scales.to(tl.pointer_type(tl.float32))


@triton.jit
def positions(number, first_block, num_blocks, numel, TILE: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Returns the blocks and the elements of a tile, and which of them exist.

    In order: ``blocks`` ``(TILE,)`` of the row; ``elements`` ``(TILE, H, B / H)``, counted from ``-first_block * B``;
    whether all blocks are within the row; which elements are among the ``numel``; whether all are. If all are, memory
    is read and written without a mask, in wide accesses.
    """
    blocks = number * TILE + tl.arange(0, TILE)
    first = (tl.cast(first_block, tl.int64) + blocks) * B
    within = tl.arange(0, H)[:, None] * (B // H) + tl.arange(0, B // H)[None, :]
    elements = first[:, None, None] + within[None, :, :]
    inside = (blocks < num_blocks)[:, None, None] & (elements < numel)
    end = (number + 1) * TILE
    fits = end <= num_blocks
    return blocks, elements, fits, inside, fits & ((tl.cast(first_block, tl.int64) + end) * B <= numel)


@triton.jit
def level_of(code, H: tl.constexpr):
    """Returns the levels of codes in float32."""
    if H == 2:
        code = code * (tl.abs(code) + _CURVE)
    return code


@triton.jit
def read_tile(message, row, blocks, num_blocks, fits, ROWS_ALIGNED: tl.constexpr, B: tl.constexpr, H: tl.constexpr):
    """Returns the levels of a tile in float32 and its scales ``(TILE, 1, 1)`` from a ``row`` of a message."""
    codes, scales = row_at(message, row, num_blocks, ROWS_ALIGNED, B, H)
    at = blocks[:, None, None] * (B // H) + tl.arange(0, B // H)[None, None, :]
    inside = blocks < num_blocks
    code = load(codes + at, inside[:, None, None], fits)
    scale = load(scales + blocks, inside, fits)
    if H == 2:
        code = (code.to(tl.int32) << (28 - 4 * tl.arange(0, H)[None, :, None])) >> 28
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return level_of(code.to(tl.float32), H), scale[:, None, None]


@triton.jit
def average_tile(
    message,
    num_rows,
    blocks,
    num_blocks,
    fits,
    ROWS_ALIGNED: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
):
    """Returns the mean ``(TILE, H, B / H)`` over the rows of a message; ``num_rows`` equals ``WORLD_SIZE``.

    The compiler unrolls the loop over the rows if it knows ``num_rows``, which is faster but takes many registers.
    """
    mean = tl.zeros((TILE, H, B // H), tl.float32)
    for rank in range(num_rows):
        level, scale = read_tile(message, rank, blocks, num_blocks, fits, ROWS_ALIGNED, B, H)
        weight = over_ranks(scale, WORLD_SIZE, (TILE, 1, 1))
        mean = tl.fma(level, tl.broadcast_to(weight, (TILE, H, B // H)), mean)
    return mean


@triton.jit
def largest(x):
    """Returns the largest element ``(TILE,)`` of each block."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def find_scales(c, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr):
    """Returns the scales ``(TILE,)`` of blocks and the inverses of their magnitudes."""
    # Magnitudes have the same order as integers, with NaN above infinity, so one maximum finds both.
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
        # As signed integers all negative numbers are below the positive ones, so this maximum ignores them.
        turned = (largest(bits) == top) & (top < _INFINITE) & (top > 0)
        scale = tl.where(turned, -scale, scale)
    return scale, inverse


@triton.jit
def write_tile(
    c,
    message,
    row,
    blocks,
    num_blocks,
    fits,
    K: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
):
    """Writes ``c`` ``(TILE, H, B / H)`` to a message; returns what is rounded off, and which blocks are finite."""
    scale, inverse = find_scales(c, K, H, TILE)
    inverse = tl.broadcast_to(inverse[:, None, None], (TILE, H, B // H))
    if H == 2:
        root = tl.sqrt_rn(tl.fma(tl.abs(c), inverse, tl.full((TILE, H, B // H), _OFFSET, tl.float32))) - _CURVE / 2
        root = tl.where((c < 0) != (scale < 0)[:, None, None], -root, root)
        rounded = tl.where(root < _MAX_CODE_4, root, _MAX_CODE_4) + _MAGIC
    else:
        rounded = tl.fma(c, inverse, tl.full((TILE, H, B // H), _MAGIC, tl.float32))
    code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    codes, scales = row_at(message, row, num_blocks, ROWS_ALIGNED, B, H)
    at = blocks[:, None, None] * (B // H) + tl.arange(0, B // H)[None, None, :]
    inside = blocks < num_blocks
    if H == 2:
        packed = tl.sum((code.to(tl.int32) & 15) << (4 * tl.arange(0, H)[None, :, None]), 1)[:, None, :]
        store(codes + at, packed.to(tl.int8), inside[:, None, None], fits)
        store(scales + blocks, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), inside, fits)
    else:
        store(codes + at, code, inside[:, None, None], fits)
        store(scales + blocks, scale, inside, fits)
    wide = tl.broadcast_to(scale[:, None, None], (TILE, H, B // H))
    return tl.fma(-level_of(code.to(tl.float32), H), wide, c), (scale < float("inf"))[:, None, None]
