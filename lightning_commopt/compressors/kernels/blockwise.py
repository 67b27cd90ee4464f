"""Arithmetic of an average whose two transfers are blocks of int8 or int4 with one scale each.

A rank encodes its gradients, one shard for each peer (`encode`); after an all-to-all it averages its own shard and
rounds the mean (`reduce`); after an all-gather it decodes the whole mean (`decode`). A rank that needs only its own
shard averages it without rounding (`average`). The caller issues the collectives. If the step turns out not to be
finite (`is_finite`), `decode` also restores the residual.

Shapes, formats and messages are described in `blockwise_format`.

For each block, where ``top`` is its largest magnitude, in float32 and with one rounding per operation::

    scale = max(top * K, 2**-126), 0 where top is 0

8 bits::

    codes = round(c * (1 / scale))                     half to even, in [-127, 127]; K is 1/127 less 2**-22 of it

The error of a rounding is at most ``0.50005 * scale``, which is at most ``max(top / 253.9, 2**-127)``. The lower limit
of the scale keeps ``1 / scale`` finite, and K is small enough that no decoded magnitude exceeds ``top``.

4 bits: a code ``k`` stands for ``k (|k| + 4)``, so that steps grow from 5 near zero to 19 at the ends: 0, 5, 12, 21,
32, 45, 60, 77 and, on one side, 96. Blocks of gradients have few large elements, and Adam divides by the size of each
element, so small ones need more precision. The scale is truncated to bfloat16, and its sign gives the largest magnitude
the code -8::

    codes = round(sqrt(|c| / scale + 3.75) - 2)        the nearest level; with the sign of c / scale, at most 7

The error of a rounding is at most ``top / 10`` in the direction of ``top`` and ``top / 5`` against it.

A block with a NaN or an infinity has a NaN or an infinity as its scale, and its codes are meaningless.

Example, 8 bits, B = 4: ``[1, -0.5, 0.1, 0]`` has scale 0.007874 and codes ``[127, -64, 13, 0]``, and decodes to
``[1, -0.5039, 0.1024, 0]``; ``[0, 0.0039, -0.0024, 0]`` stay in the residual. 4 bits: it has scale -0.01038 and codes
``[-8, 5, -2, 0]``, and decodes to ``[0.9961, -0.4669, 0.1245, 0]``.

All forms (plain torch, Triton and C) round once where a sum follows a product; plain torch does so on processors whose
vectors do (AVX2, AVX-512). There all forms give the same bits, except for the last bit of a residual; on other
processors means differ in the last bit, and codes by one if ``c / scale`` is half way between two. Blocks of fewer than
32 elements are slow in plain torch on CPU, which does not vectorise maxima over so few.

This differs from its sources in: 1. The blocks of Dettmers et al., 8-bit Optimizers (arXiv:2110.02861), have 8-bit
levels from a table; here levels are evenly spaced with 8 bits and quadratic with 4. 2. The two quantized transfers
around a sum of Wang et al., ZeRO++ (arXiv:2306.10209), drop what is rounded off; here it can be kept.
"""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.compressors.kernels.blockwise_format import (
    BlockFormat,
    Undo,
    add_finite,
    average_shares,
    chunks,
    fill,
    new_chunks,
    put_finite,
    put_rest,
    read_levels,
    round_blocks,
)
from lightning_commopt.compressors.kernels.dispatch import also_in


@also_in("triton", "c")
def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_format: BlockFormat) -> None:
    """Writes ``c = flat + residual`` to ``message``, one row for each peer; what is rounded off is the new residual.

    Args:
        flat: ``(n,)`` of any floating dtype; not changed. Values beyond the range of float32 count as infinite.
        residual: ``(n,)`` float32 or bfloat16; updated in place, except in blocks that are not finite. None for zeros,
            if what is rounded off is to be dropped.
        message: ``(W, shard_bytes)`` uint8; overwritten.
        block_format: format of the blocks.
    """
    parts = block_format.split_for(flat, message)
    assert residual is None or residual.shape == flat.shape
    memory = new_chunks(2, parts, block_format.block_size)
    for elements, codes, scales in chunks(parts, block_format.block_size):
        before = None if residual is None else residual[elements]
        blocks, levels = memory[:, : len(codes)]
        rounded = round_blocks(fill(flat[elements], before, blocks), block_format, levels)
        codes.copy_(rounded.codes)
        scales.copy_(rounded.scales.squeeze(1))
        if before is not None:
            put_rest(blocks, rounded, before)


@also_in("triton", "c")
def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_format: BlockFormat) -> None:
    """Averages what all ranks sent of one shard, and rounds the mean to ``mean_message``.

    Each rank's share is divided by ``W`` before it is added, so that the sum cannot overflow unless a share does.

    Args:
        received: ``(W, shard_bytes)`` uint8.
        mean_message: ``(shard_bytes,)`` uint8; overwritten.
        residual_shard: ``(<= s,)`` this rank's residual in its shard, shorter or empty at the end of the bucket, or
            None. ``W`` times what was rounded off is added, so that the mean of the residuals grows by the error of
            the mean; blocks that are not finite keep their residual.
        block_format: format of the blocks.
    """
    shares, mean = block_format.split(received), block_format.split(mean_message)
    assert shares.codes.shape[1:] == mean.codes.shape[1:]
    for elements, codes, scales in chunks(mean, block_format.block_size):
        average = average_shares(shares, elements, block_format)
        rounded = round_blocks(average, block_format)
        codes.copy_(rounded.codes)
        scales.copy_(rounded.scales.squeeze(1))
        if residual_shard is not None:
            average.addcmul_(rounded.levels, rounded.scales, value=-1)
            add_finite(average, rounded.scales, residual_shard[elements], len(received))


@also_in("triton", "c")
def average(received: Tensor, mean: Tensor, block_format: BlockFormat) -> None:
    """Averages what all ranks sent of one shard, as `reduce` does before it rounds.

    Args:
        received: ``(W, shard_bytes)`` uint8.
        mean: ``(s,)`` of any floating dtype; overwritten. A block is not finite if a rank's block is not.
        block_format: format of the blocks.
    """
    shares = block_format.split(received)
    assert mean.numel() == shares.scales.shape[1] * block_format.block_size
    for elements, _, _ in chunks(block_format.split(received[:1]), block_format.block_size):
        mean[elements].copy_(average_shares(shares, elements, block_format).view(-1))


@also_in("triton")
def is_finite(message: Tensor, block_format: BlockFormat) -> Tensor:
    """Returns whether all values in ``message`` ``(W, shard_bytes)`` are finite, from its scales.

    Returns:
        0-dim bool, or ``(k,)`` bool with one element for each part of the message.
    """
    return block_format.split(message).scales.amax().isfinite()


@also_in("triton", "c")
def decode(message: Tensor, flat: Tensor, block_format: BlockFormat, undo: Undo | None = None) -> None:
    """Decodes ``message`` into ``flat``.

    Args:
        message: ``(W, shard_bytes)`` uint8, the ``mean_message`` of every rank.
        flat: ``(n,)`` of any floating dtype; overwritten. With ``undo`` it must still hold what `encode` was given.
        block_format: format of the blocks.
        undo: if the step was not finite, its residual is first restored to what it was before `encode`, up to a
            rounding of ``flat + residual``; blocks that were not finite have kept it. None if there is no residual.
    """
    parts = block_format.split_for(flat, message)
    if undo is not None and not undo.finite:
        _undo_reduce(undo, block_format)
        _undo_encode(flat, undo, block_format)
    for elements, codes, scales in chunks(parts, block_format.block_size):
        part = flat[elements]
        part.copy_((read_levels(codes, block_format) * scales.float().unsqueeze(1)).view(-1)[: part.numel()])


def _undo_reduce(undo: Undo, block_format: BlockFormat) -> None:
    """Subtracts, up to a rounding, what `reduce` added to the residual.

    The mean is computed again, so that steps that are finite need no memory for this.
    """
    shares, mean = block_format.split(undo.received), block_format.split(undo.mean_message)
    size = block_format.shard_numel(undo.residual.numel(), len(undo.received))
    own_shard = undo.residual[undo.rank * size : (undo.rank + 1) * size]
    for elements, codes, scales in chunks(mean, block_format.block_size):
        lost = average_shares(shares, elements, block_format)
        lost.addcmul_(read_levels(codes, block_format), scales.float().unsqueeze(1), value=-1)
        add_finite(lost, scales, own_shard[elements], -len(undo.received))


def _undo_encode(flat: Tensor, undo: Undo, block_format: BlockFormat) -> None:
    """Restores the residual to what it was before `encode`, up to a rounding of ``flat + residual``."""
    assert undo.residual.shape == flat.shape
    for elements, codes, scales in chunks(block_format.split_for(flat, undo.message), block_format.block_size):
        sent = read_levels(codes, block_format).mul_(scales.float().unsqueeze(1))
        values = sent.view(-1)[: flat[elements].numel()]
        values.add_(undo.residual[elements]).sub_(flat[elements])
        put_finite(sent, scales, undo.residual[elements])
