"""The operations of `blockwise` in Triton, one kernel each; `blockwise` defines what they do.

A program works on a tile ``(TILE, H, B / H)`` of whole blocks of one shard. Each block has ``H`` parts, the number of
codes in a byte, which is 1 for 8 bits and 2 for 4. Multiplications and additions are fused only where ``fma`` is
written, and the compiler may fuse no others, so that the numbers are those of plain torch.

Arguments of all kernels: messages, uint8 ``(W, shard_bytes)``; ``num_blocks`` in a row of them; and whether this number
is a multiple of 16 (``ROWS_ALIGNED``), so that the codes of all rows can be read in wide accesses. Kernels are compiled
once for both cases, and not again for other sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo
from lightning_commopt.compressors.kernels.blockwise_tiles_triton import (
    average_tile,
    positions,
    read_tile,
    row_at,
    write_tile,
)
from lightning_commopt.compressors.kernels.elementwise_triton import load, store, store_if
from lightning_commopt.compressors.kernels.launch_triton import launch

_TILE_NUMEL, _NUM_WARPS = 2048, 4
"""Elements and warps of a tile: 16 elements for each thread, so that it has several wide accesses under way, and spills
no registers (``benchmarks/compiled_kernels.py``). Of the sizes in ``benchmarks/kernel_tiles.py`` these are the fastest
for int4 without error feedback on an H200; for int8 they differ little."""
_SIZES = ["num_blocks", "numel", "num_rows", "rank"]
# Scales are few: 32 programs read 1024 at a time, so that there are few flags, which every program of `_decode` reads.
_NUM_FLAGS, _NUM_SCALES = 32, 1024
# A tile is undone in parts, since that holds more values at a time than decoding: 48 registers instead of 109.
_UNDO_PARTS = tl.constexpr(8)


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_format: BlockFormat) -> None:
    """Quantizes ``flat + residual`` to ``message``."""
    assert message.shape[1] == block_format.shard_bytes(flat.numel(), len(message))
    added = flat if residual is None else residual
    constants = {"HAS_RESIDUAL": residual is not None, "K": block_format.scale_of_top}
    _launch(_encode, block_format, message, flat, added, flat.numel(), **constants)


def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_format: BlockFormat) -> None:
    """Averages what was ``received`` and quantizes that to ``mean_message``."""
    residual, numel = (received, 0) if residual_shard is None else (residual_shard, residual_shard.numel())
    has_residual, factor = residual_shard is not None, block_format.scale_of_top
    constants = {"HAS_RESIDUAL": has_residual, "K": factor, "WORLD_SIZE": len(received)}
    _launch(_reduce, block_format, mean_message, received, residual, numel, **constants)


def average(received: Tensor, mean: Tensor, block_format: BlockFormat) -> None:
    """Averages what was ``received`` into ``mean``."""
    assert received.shape[1] == block_format.shard_bytes(mean.numel(), 1)
    _launch(_average, block_format, received[0], mean, mean.numel(), WORLD_SIZE=len(received))


def is_finite(message: Tensor, block_format: BlockFormat) -> Tensor:
    """Returns whether parts of ``message`` are finite."""
    flags = torch.empty(_NUM_FLAGS, dtype=torch.bool, device=message.device)
    num_rows, row_bytes = message.shape
    args = (message, flags, num_rows, row_bytes // block_format.block_bytes)
    constants = {"B": block_format.block_size, "H": 8 // block_format.bits, "BLOCK": _NUM_SCALES}
    launch(_find_bad_scales, (_NUM_FLAGS, 1, 1), *args, **constants, num_warps=4, enable_fp_fusion=False)
    return flags


def decode(message: Tensor, flat: Tensor, block_format: BlockFormat, undo: Undo | None = None) -> None:
    """Decodes ``message`` into ``flat``, and first restores the residual unless the step was finite."""
    assert message.shape[1] == block_format.shard_bytes(flat.numel(), len(message))
    constants: dict[str, Any] = {"HAS_UNDO": undo is not None, "FLAGS": 1, "WORLD_SIZE": 1}
    given: tuple[Any, ...] = (flat, message, message, message, message, 0)
    if undo is not None:
        constants |= {"FLAGS": undo.finite.numel(), "WORLD_SIZE": len(message)}
        given = (undo.residual, undo.message, undo.received, undo.mean_message, undo.finite, undo.rank)
    _launch(_decode, block_format, message, flat, *given, flat.numel(), **constants)


def _launch(kernel: Any, block_format: BlockFormat, message: Tensor, *args: Any, **constants: Any) -> None:
    """Runs ``kernel`` over all blocks of a message of one or several rows, which is its first argument."""
    bits, block_size = block_format
    num_blocks, tile = message.shape[-1] // block_format.block_bytes, max(_TILE_NUMEL // block_size, 1)
    grid = (-(-num_blocks // tile), len(message) if message.dim() > 1 else 1, 1)
    constants |= {"ROWS_ALIGNED": num_blocks % 16 == 0, "B": block_size, "H": 8 // bits, "TILE": tile}
    launch(kernel, grid, message, *args, num_blocks, **constants, num_warps=_NUM_WARPS, enable_fp_fusion=False)


@triton.jit(do_not_specialize=_SIZES)
def _encode(
    message,
    flat,
    residual,
    numel,
    num_blocks,
    HAS_RESIDUAL: tl.constexpr,
    K: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1)
    tile, first = tl.program_id(0), row.to(tl.int64) * num_blocks
    # In 64 bits, as a row of a whole unit of FSDP2 may have more than 2**31 codes; a rank's shard has fewer.
    blocks, elements, fits, inside, is_whole = positions(tile.to(tl.int64), first, num_blocks, numel, TILE, B, H)
    c = load(flat + elements, inside, is_whole).to(tl.float32)
    if HAS_RESIDUAL:
        c += load(residual + elements, inside, is_whole).to(tl.float32)
    rest, finite = write_tile(c, message, row, blocks, num_blocks, fits, K, ROWS_ALIGNED, TILE, B, H)
    if HAS_RESIDUAL:
        store_if(residual + elements, rest.to(residual.dtype.element_ty), finite, inside, is_whole)


@triton.jit(do_not_specialize=_SIZES)
def _reduce(
    mean_message,
    received,
    residual,
    numel,
    num_blocks,
    HAS_RESIDUAL: tl.constexpr,
    K: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks, elements, fits, inside, is_whole = positions(tl.program_id(0), 0, num_blocks, numel, TILE, B, H)
    mean = average_tile(received, WORLD_SIZE, blocks, num_blocks, fits, ROWS_ALIGNED, WORLD_SIZE, TILE, B, H)
    rest, finite = write_tile(mean, mean_message, 0, blocks, num_blocks, fits, K, ROWS_ALIGNED, TILE, B, H)
    if HAS_RESIDUAL:
        kept = load(residual + elements, inside, is_whole).to(tl.float32)
        kept += rest * WORLD_SIZE
        store_if(residual + elements, kept.to(residual.dtype.element_ty), finite, inside, is_whole)


@triton.jit(do_not_specialize=_SIZES)
def _average(
    received,
    mean,
    numel,
    num_blocks,
    WORLD_SIZE: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks, elements, fits, inside, is_whole = positions(tl.program_id(0), 0, num_blocks, numel, TILE, B, H)
    value = average_tile(received, WORLD_SIZE, blocks, num_blocks, fits, ROWS_ALIGNED, WORLD_SIZE, TILE, B, H)
    store(mean + elements, value.to(mean.dtype.element_ty), inside, is_whole)


@triton.jit(do_not_specialize=_SIZES)
def _find_bad_scales(message, flags, num_rows, num_blocks, B: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """Writes one flag per program: whether all scales that it reads are finite."""
    total = tl.cast(num_rows, tl.int64) * num_blocks
    is_bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, total, tl.num_programs(0) * BLOCK):
        index = first + tl.arange(0, BLOCK)
        row = index // num_blocks
        _, scales = row_at(message, row, num_blocks, False, B, H)
        scale = tl.load(scales + (index - row * num_blocks), index < total, 0)
        if H == 2:
            scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        is_bad |= (tl.abs(scale) < float("inf")).to(tl.int32) ^ 1
    tl.store(flags + tl.program_id(0), tl.max(is_bad, 0) == 0)


@triton.jit(do_not_specialize=_SIZES)
def _decode(
    message,
    flat,
    residual,
    sent,
    received,
    mean_message,
    finite,
    rank,
    numel,
    num_blocks,
    HAS_UNDO: tl.constexpr,
    FLAGS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decodes one tile. If the step was not ``finite``, it first undoes what `_reduce`, then what `_encode` did."""
    row = tl.program_id(1)
    tile, first = tl.program_id(0), row.to(tl.int64) * num_blocks
    # In 64 bits, as a row of a whole unit of FSDP2 may have more than 2**31 codes; a rank's shard has fewer.
    blocks, elements, fits, inside, is_whole = positions(tile.to(tl.int64), first, num_blocks, numel, TILE, B, H)
    if HAS_UNDO:  # noqa: SIM102 - Triton would compute both sides of `and`
        if tl.min(tl.load(finite + tl.arange(0, FLAGS)).to(tl.int32), 0) == 0:
            # The compiler does not know the number of parts, and therefore does not unroll the loop.
            end = tl.minimum((tile + 1) * _UNDO_PARTS, tl.cdiv(num_blocks, TILE // _UNDO_PARTS))
            for number in range(tile * _UNDO_PARTS, end):
                # fmt: off
                _undo_part(
                    flat, residual, sent, received, mean_message, row, rank, number, numel, num_blocks,
                    WORLD_SIZE, ROWS_ALIGNED, B, H, TILE // _UNDO_PARTS,
                )
                # fmt: on
            tl.debug_barrier()  # all threads must have read the gradients before any overwrites them
    level, scale = read_tile(message, row, blocks, num_blocks, fits, ROWS_ALIGNED, B, H)
    store(flat + elements, (level * scale).to(flat.dtype.element_ty), inside, is_whole)


@triton.jit
def _undo_part(
    flat,
    residual,
    sent,
    received,
    mean_message,
    row,
    rank,
    number,
    numel,
    num_blocks,
    WORLD_SIZE: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
):
    """Undoes what `_reduce` and `_encode` did to a part of the residual."""
    first = row.to(tl.int64) * num_blocks
    # In 64 bits as in `_decode`, since two kinds of places take a third more registers.
    blocks, elements, _, inside, _ = positions(tl.cast(number, tl.int64), first, num_blocks, numel, TILE, B, H)
    kept = tl.load(residual + elements, inside, 0)
    if row == rank:
        mean = average_tile(
            received, tl.num_programs(1), blocks, num_blocks, False, ROWS_ALIGNED, WORLD_SIZE, TILE, B, H
        )
        level, scale = read_tile(mean_message, 0, blocks, num_blocks, False, ROWS_ALIGNED, B, H)
        rest = tl.fma(-level, tl.broadcast_to(scale, (TILE, H, B // H)), mean)
        before = (kept.to(tl.float32) + rest * -WORLD_SIZE).to(kept.dtype)
        kept = tl.where(tl.broadcast_to(scale < float("inf"), (TILE, H, B // H)), before, kept)
    level, scale = read_tile(sent, row, blocks, num_blocks, False, ROWS_ALIGNED, B, H)
    gradients = tl.load(flat + elements, inside, 0).to(tl.float32)
    before = (level * scale + kept.to(tl.float32) - gradients).to(kept.dtype)
    kept = tl.where(tl.broadcast_to(scale < float("inf"), (TILE, H, B // H)), before, kept)
    tl.store(residual + elements, kept, inside)
