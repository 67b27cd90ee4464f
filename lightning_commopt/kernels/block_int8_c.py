"""The operations of `block_int8` in C, for float32 on CPU; what they do is defined there."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.kernels.c_library import call
from lightning_commopt.kernels.int8_message import split, split_for

_LONGEST_BLOCK = 256


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_size: int) -> object:
    """Writes ``flat + residual`` to ``message``; what is rounded off is the new residual."""
    if block_size > _LONGEST_BLOCK:
        return NotImplemented
    for row, (codes, scales) in enumerate(zip(*split_for(flat, message, block_size), strict=True)):
        start, numel = _span(row, codes, flat)
        call("encode", numel, *codes.shape, flat[start:], None if residual is None else residual[start:], codes, scales)
    return None


def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_size: int) -> object:
    """Averages what was ``received`` to ``mean_message``; what is rounded off is added to ``residual_shard``."""
    if block_size > _LONGEST_BLOCK:
        return NotImplemented
    shares, mean = split(received, block_size), split(mean_message, block_size)
    world_size, num_blocks, _ = shares.codes.shape
    numel = 0 if residual_shard is None else residual_shard.numel()
    stride = shares.codes.stride(0)
    call("reduce", world_size, stride, numel, num_blocks, block_size, shares.codes, residual_shard, *mean)
    return None


def decode(message: Tensor, flat: Tensor, block_size: int) -> None:
    """Decodes ``message`` into ``flat``."""
    for row, (codes, scales) in enumerate(zip(*split_for(flat, message, block_size), strict=True)):
        start, numel = _span(row, codes, flat)
        call("decode", numel, *codes.shape, codes, scales, flat[start:])


def _span(row: int, codes: Tensor, flat: Tensor) -> tuple[int, int]:
    """Returns where the elements of a row begin in a bucket, and how many there are."""
    start = min(row * codes.numel(), flat.numel())
    return start, min(codes.numel(), flat.numel() - start)
