"""The operations of `block_int8` in Triton, one kernel each; what they do is defined there.

A program works on a tile ``(TILE, B)``: whole blocks of one shard. Where a multiplication and an addition are fused
this says so (``fma``), and the compiler may fuse no others: the numbers are those of plain torch.

Arguments of all kernels: ``codes`` and ``scales``, the parts of a message ``(W, shard_bytes)``, and ``num_blocks``, the
blocks in a row of it. ``finite`` is a bool that is read on the device.
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

from lightning_commopt.kernels.int8_message import (
    ROUNDING_MAGIC,
    SCALE_OF_TOP,
    SMALLEST_SCALE,
    Parts,
    split,
    split_for,
)

_SCALE_OF_TOP = tl.constexpr(SCALE_OF_TOP)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_MAGIC = tl.constexpr(ROUNDING_MAGIC)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_TILE_NUMEL = 4096


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_size: int) -> None:
    """Quantizes ``flat + residual`` to ``message``."""
    added = flat if residual is None else residual
    _launch(_encode, split_for(flat, message, block_size), flat, added, flat.numel(), HAS_RESIDUAL=residual is not None)


def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_size: int) -> None:
    """Averages what was ``received`` and quantizes that to ``mean_message``."""
    shares, mean = split(received, block_size), split(mean_message, block_size)
    residual = mean.scales if residual_shard is None else residual_shard
    numel = 0 if residual_shard is None else residual_shard.numel()
    _launch(_reduce, mean, *shares, residual, numel, WORLD_SIZE=len(shares.codes))


def decode(message: Tensor, flat: Tensor, block_size: int) -> None:
    """Decodes ``message`` into ``flat``."""
    _launch(_decode, split_for(flat, message, block_size), flat, flat.numel())


def undo(flat: Tensor, residual: Tensor, message: Tensor, finite: Tensor, block_size: int) -> None:
    """Brings ``residual`` back, unless ``finite``."""
    _launch(_undo, split_for(flat, message, block_size), flat, residual, flat.numel(), finite)


def undo_reduce(
    received: Tensor, mean_message: Tensor, residual_shard: Tensor, finite: Tensor, block_size: int
) -> None:
    """Takes back what `reduce` added, unless ``finite``."""
    shares, mean = split(received, block_size), split(mean_message, block_size)
    numel, world_size = residual_shard.numel(), len(shares.codes)
    _launch(_undo_reduce, mean, *shares, residual_shard, numel, finite, WORLD_SIZE=world_size)


def _launch(kernel: Any, parts: Parts, *args: Any, **flags: int) -> None:
    """Runs ``kernel`` over all blocks of ``parts``."""
    world_size, num_blocks, block_size = parts.codes.shape
    tile = max(_TILE_NUMEL // block_size, 1)
    with torch.cuda.device_of(parts.codes):
        kernel[triton.cdiv(num_blocks, tile), world_size](
            *parts, num_blocks, *args, **flags, B=block_size, TILE=tile, num_warps=8, enable_fp_fusion=False
        )


@triton.jit
def _positions(num_blocks, numel, TILE: tl.constexpr, B: tl.constexpr):
    """Returns which of the row's blocks, and which elements of the bucket, are in this program's tile."""
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = (tl.program_id(1).to(tl.int64) * num_blocks + blocks) * B
    elements = first[:, None] + tl.arange(0, B)[None, :]
    return blocks, elements, (blocks < num_blocks)[:, None] & (elements < numel)


@triton.jit
def _read(codes, scales, row, blocks, num_blocks, B: tl.constexpr):
    """Returns a tile's codes in float32 and its scales ``(TILE, 1)`` from this ``row`` of a message."""
    start = row.to(tl.int64) * num_blocks * (B + 4)
    inside = blocks < num_blocks
    code = tl.load(codes + start + blocks[:, None] * B + tl.arange(0, B)[None, :], inside[:, None], 0)
    return code.to(tl.float32), tl.load(scales + start // 4 + blocks, inside, 0)[:, None]


@triton.jit
def _inverse(x, SHAPE: tl.constexpr):
    """Returns ``1 / x`` rounded as float32 rounds: an estimate, and two steps of Newton's method in float64.

    ``tl.div_rn`` flushes subnormal numbers in some versions of Triton, and a division in float64 spills registers.
    """
    estimate = 1.0 / x
    wide, one, inverse = x.to(tl.float64), tl.full(SHAPE, 1.0, tl.float64), estimate.to(tl.float64)
    for _ in tl.static_range(2):
        inverse = tl.fma(tl.fma(-wide, inverse, one), inverse, inverse)
    return tl.where(x < float("inf"), inverse.to(tl.float32), estimate)


@triton.jit
def _over_ranks(x, WORLD_SIZE: tl.constexpr, SHAPE: tl.constexpr):
    """Returns ``x / WORLD_SIZE`` rounded as float32 rounds: a product with the inverse, corrected in float64."""
    wide, inverse = x.to(tl.float64), tl.full(SHAPE, 1 / WORLD_SIZE, tl.float64)
    quotient = wide * inverse
    rest = tl.fma(-quotient, tl.full(SHAPE, WORLD_SIZE, tl.float64), wide)
    return tl.where(x < float("inf"), tl.fma(rest, inverse, quotient).to(tl.float32), x)


@triton.jit
def _average(codes, scales, blocks, num_blocks, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr, B: tl.constexpr):
    """Returns the mean ``(TILE, B)`` over the rows of a message."""
    mean = tl.zeros((TILE, B), tl.float32)
    for rank in range(WORLD_SIZE):
        code, scale = _read(codes, scales, tl.program_id(1) + rank, blocks, num_blocks, B)
        weight = _over_ranks(scale, WORLD_SIZE, (TILE, 1))
        mean = tl.fma(code, tl.broadcast_to(weight, (TILE, B)), mean)
    return mean


@triton.jit
def _quantize(c, codes, scales, blocks, num_blocks, TILE: tl.constexpr, B: tl.constexpr):
    """Writes ``c`` ``(TILE, B)`` to a message; returns what that leaves out, and which blocks are finite."""
    # As integers magnitudes have the same order, with NaN above infinity: one maximum that loses neither.
    top = tl.max(c.to(tl.int32, bitcast=True) & _MAGNITUDE, 1).to(tl.float32, bitcast=True)
    wanted = top * _SCALE_OF_TOP
    scale = tl.where(wanted < _SMALLEST_SCALE, _SMALLEST_SCALE, wanted)
    inverse = _inverse(scale, (TILE,))
    scale = tl.where(top == 0, 0.0, scale)
    magic = tl.full((TILE, B), _MAGIC, tl.float32)
    rounded = tl.fma(c, tl.broadcast_to(inverse[:, None], (TILE, B)), magic)
    code = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    start = tl.program_id(1).to(tl.int64) * num_blocks * (B + 4)
    inside = blocks < num_blocks
    tl.store(codes + start + blocks[:, None] * B + tl.arange(0, B)[None, :], code, inside[:, None])
    tl.store(scales + start // 4 + blocks, scale, inside)
    rest = tl.fma(-code.to(tl.float32), tl.broadcast_to(scale[:, None], (TILE, B)), c)
    return rest, (scale < float("inf"))[:, None]


@triton.jit
def _encode(
    codes, scales, num_blocks, flat, residual, numel, HAS_RESIDUAL: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr
):
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B)
    c = tl.load(flat + elements, inside, 0).to(tl.float32)
    if HAS_RESIDUAL:
        c += tl.load(residual + elements, inside, 0).to(tl.float32)
    rest, finite = _quantize(c, codes, scales, blocks, num_blocks, TILE, B)
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
    WORLD_SIZE: tl.constexpr,
    B: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B)
    mean = _average(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B)
    rest, finite = _quantize(mean, codes, scales, blocks, num_blocks, TILE, B)
    _add(residual, elements, rest * WORLD_SIZE, inside & finite)


@triton.jit
def _decode(codes, scales, num_blocks, flat, numel, B: tl.constexpr, TILE: tl.constexpr):
    blocks, elements, inside = _positions(num_blocks, numel, TILE, B)
    code, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B)
    tl.store(flat + elements, (code * scale).to(flat.dtype.element_ty), inside)


@triton.jit
def _undo(codes, scales, num_blocks, flat, residual, numel, finite, B: tl.constexpr, TILE: tl.constexpr):
    if tl.load(finite) == 0:
        blocks, elements, inside = _positions(num_blocks, numel, TILE, B)
        code, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B)
        inside = inside & (scale < float("inf"))
        values = tl.load(flat + elements, inside, 0).to(tl.float32)
        kept = tl.load(residual + elements, inside, 0).to(tl.float32)
        kept = code * scale + kept - values
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
    TILE: tl.constexpr,
):
    if tl.load(finite) == 0:
        blocks, elements, inside = _positions(num_blocks, numel, TILE, B)
        mean = _average(all_codes, all_scales, blocks, num_blocks, WORLD_SIZE, TILE, B)
        code, scale = _read(codes, scales, tl.program_id(1), blocks, num_blocks, B)
        rest = tl.fma(-code, tl.broadcast_to(scale, (TILE, B)), mean)
        _add(residual, elements, rest * -WORLD_SIZE, inside & (scale < float("inf")))


@triton.jit
def _add(residual, elements, values, inside):
    """Adds ``values`` to what is ``inside`` of ``residual``."""
    kept = tl.load(residual + elements, inside, 0).to(tl.float32)
    tl.store(residual + elements, (kept + values).to(residual.dtype.element_ty), inside)
