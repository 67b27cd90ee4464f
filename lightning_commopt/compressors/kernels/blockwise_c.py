"""The operations of `blockwise` in C, for float32 on CPU; `blockwise` defines what they do."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo
from lightning_commopt.compressors.kernels.c_library import call

_MAX_BLOCK_SIZE = 256
"""``MAX_IN_BLOCK`` of the C source, whose local arrays have a block; `BlockInt8` and `BlockInt4` allow no more."""
_MIN_INT4_BLOCK_SIZE = 32
"""Half a block of int4 must fill the 16 lanes of an AVX-512 vector."""


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_format: BlockFormat) -> object:
    """Writes ``flat + residual`` to ``message``, and what is rounded off to the residual."""
    bits, block_size = block_format
    if not _has_loops_for(block_format):
        return NotImplemented
    for row, (codes, scales) in enumerate(zip(*block_format.split_for(flat, message), strict=True)):
        start, numel = _span(row, len(scales) * block_size, flat)
        its_residual = None if residual is None else residual[start:]
        call("encode", bits, numel, len(scales), block_size, flat[start:], its_residual, codes, scales)
    return None


def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_format: BlockFormat) -> object:
    """Averages what was ``received`` to ``mean_message``; what is rounded off is added to ``residual_shard``."""
    bits, block_size = block_format
    if not _has_loops_for(block_format):
        return NotImplemented
    shares, mean = block_format.split(received), block_format.split(mean_message)
    world_size, num_blocks = shares.scales.shape
    numel = 0 if residual_shard is None else residual_shard.numel()
    stride = shares.codes.stride(0)
    call("reduce", bits, world_size, stride, numel, num_blocks, block_size, shares.codes, residual_shard, *mean)
    return None


def average(received: Tensor, mean: Tensor, block_format: BlockFormat) -> object:
    """Averages what was ``received`` into ``mean``."""
    bits, block_size = block_format
    if not _has_loops_for(block_format):
        return NotImplemented
    codes, scales = block_format.split(received)
    world_size, num_blocks = scales.shape
    assert mean.numel() == num_blocks * block_size
    call("average", bits, world_size, codes.stride(0), num_blocks, block_size, codes, mean)
    return None


def decode(message: Tensor, flat: Tensor, block_format: BlockFormat, undo: Undo | None = None) -> object:
    """Decodes ``message`` into ``flat``. If a step is to be undone, plain torch does it."""
    bits, block_size = block_format
    if not _has_loops_for(block_format) or not (undo is None or undo.finite):
        return NotImplemented
    for row, (codes, scales) in enumerate(zip(*block_format.split_for(flat, message), strict=True)):
        start, numel = _span(row, len(scales) * block_size, flat)
        call("decode", bits, numel, len(scales), block_size, codes, scales, flat[start:])
    return None


def _has_loops_for(block_format: BlockFormat) -> bool:
    return (
        block_format.bits == 8 or block_format.block_size >= _MIN_INT4_BLOCK_SIZE
    ) and block_format.block_size <= _MAX_BLOCK_SIZE


def _span(row: int, shard_numel: int, flat: Tensor) -> tuple[int, int]:
    """Returns the first element of a row in the bucket, and the number of its elements there."""
    start = min(row * shard_numel, flat.numel())
    return start, min(shard_numel, flat.numel() - start)
