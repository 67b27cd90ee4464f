"""The operations of `block_int8` in C, for float32 on CPU; what they do is defined there."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.kernels.block_int8_stretches import Parts
from lightning_commopt.kernels.compiled import call


def encode(flat: Tensor, residual: Tensor | None, parts: Parts) -> None:
    """Writes ``flat + residual`` to ``parts``; what is rounded off is the new residual."""
    for row, (codes, scales) in enumerate(zip(*parts, strict=True)):
        start, numel = _span(row, codes, flat)
        call("encode", numel, *codes.shape, flat[start:], None if residual is None else residual[start:], codes, scales)


def reduce(shares: Parts, mean: Parts, residual_shard: Tensor | None) -> None:
    """Averages ``shares`` to ``mean``; what is rounded off is added to ``residual_shard``."""
    world_size, num_blocks, block_size = shares.codes.shape
    numel = 0 if residual_shard is None else residual_shard.numel()
    stride = shares.codes.stride(0)
    call("reduce", world_size, stride, numel, num_blocks, block_size, shares.codes, residual_shard, *mean)


def decode(parts: Parts, flat: Tensor) -> None:
    """Writes what ``parts`` stand for to ``flat``."""
    for row, (codes, scales) in enumerate(zip(*parts, strict=True)):
        start, numel = _span(row, codes, flat)
        call("decode", numel, *codes.shape, codes, scales, flat[start:])


def _span(row: int, codes: Tensor, flat: Tensor) -> tuple[int, int]:
    """Returns where the elements of a row begin in a bucket, and how many there are."""
    start = min(row * codes.numel(), flat.numel())
    return start, min(codes.numel(), flat.numel() - start)
