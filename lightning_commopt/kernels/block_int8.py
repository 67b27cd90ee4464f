"""Arithmetic of an average whose two transfers are int8 with one scale a block.

A rank encodes its gradients, one shard for each peer (`encode`); after an all-to-all it averages its own shard and
rounds the mean again (`reduce`); after an all-gather it has the whole mean (`decode`). The collectives are the
caller's. `undo_reduce` and `undo` bring the residual back when the step turned out not to be finite.

Shapes and messages: as in `int8_message`.

Per block, with ``top`` its largest magnitude, in float32 and with one rounding an operation::

    scale = max(top * K, 2**-126), 0 where top is 0    K is 1/127 less 2**-22 of it: 127 * scale never exceeds top
    codes = round(c * (1 / scale))                     half to even, in [-127, 127]

One rounding is off by at most ``0.50005 * scale``, which is at most ``max(top / 253.9, 2**-127)``. The floor keeps
``1 / scale`` finite. A block with a NaN or an infinity has one as its scale, and its codes mean nothing.

Example, B = 4: ``[1, -0.5, 0.1, 0]`` has scale 0.007874 and codes ``[127, -64, 13, 0]``, and decodes to
``[1, -0.5039, 0.1024, 0]``; ``[0, 0.0039, -0.0024, 0]`` stay in the residual.

All forms, in plain torch, Triton and C,
multiply and add with one rounding where a sum follows a product, in plain torch wherever its vectors do that (AVX2,
AVX-512). There they give the same bits, but for the last one of a residual; elsewhere means differ in the last bit, and
codes by one where ``c / scale`` is half way between two. Blocks of less than 32 are slow in plain torch on CPU, which
does not vectorise maxima over so few.

Source: blocks as in Dettmers et al., 8-bit Optimizers (arXiv:2110.02861), we round evenly, not by a table; two
quantized transfers around a float32 sum as in Wang et al., ZeRO++ (arXiv:2306.10209), we keep what is rounded off.
"""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.kernels.block_int8_stretches import (
    Scratch,
    add_finite,
    average_shares,
    fill,
    find_scales,
    is_whole,
    put_finite,
    stretches,
    write_codes,
)
from lightning_commopt.kernels.dispatch import also_in
from lightning_commopt.kernels.int8_message import split, split_for


@also_in("triton", "c")
def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_size: int) -> None:
    """Writes ``c = flat + residual`` to ``message``, one row for each peer; what is rounded off is the new residual.

    Args:
        flat: ``(n,)`` any floating dtype; left as it was. Beyond the range of float32 it counts as infinite.
        residual: ``(n,)`` float32 or bfloat16, or None for zeros that stay zeros. Blocks that are not finite keep it.
        message: ``(W, shard_bytes)`` uint8.
        block_size: elements that share a scale.
    """
    parts = split_for(flat, message, block_size)
    assert residual is None or residual.shape == flat.shape
    scratch = Scratch.like(parts)
    for elements, codes, scales in stretches(parts, len(scratch.stretch)):
        part = flat[elements]
        before = None if residual is None else residual[elements]
        corrected = fill(part, before, codes, scratch.stretch)
        find_scales(corrected, scales, scratch)
        if before is None:
            write_codes(corrected, codes, scales, scratch, rest=None)
        elif is_whole(before, codes) and scales.amax().isfinite():
            write_codes(corrected, codes, scales, scratch, rest=before.view(codes.shape))
        else:
            write_codes(corrected, codes, scales, scratch, rest=corrected)
            put_finite(corrected, scales, before)


@also_in("triton", "c")
def reduce(received: Tensor, mean_message: Tensor, residual_shard: Tensor | None, block_size: int) -> None:
    """Averages what all ranks sent of one shard, and rounds the mean to ``mean_message``.

    Each rank's share is divided by ``W`` before it is added, so that the sum overflows no earlier than a share.

    Args:
        received: ``(W, shard_bytes)`` uint8.
        mean_message: ``(shard_bytes,)`` uint8.
        residual_shard: ``(<= s,)`` this rank's residual in its shard, shorter or empty where the bucket ends, or None.
            ``W`` times what was rounded off is added, so that the mean residual grows by what the mean lost; blocks
            that are not finite keep it.
        block_size: elements that share a scale.
    """
    shares, mean = split(received, block_size), split(mean_message, block_size)
    assert shares.codes.shape[1:] == mean.codes.shape[1:]
    scratch = Scratch.like(mean)
    for elements, codes, scales in stretches(mean, len(scratch.stretch)):
        average = average_shares(shares, elements, scratch)
        find_scales(average, scales, scratch)
        if residual_shard is None:
            write_codes(average, codes, scales, scratch, rest=None)
        else:
            write_codes(average, codes, scales, scratch, rest=average)
            add_finite(average, scales, residual_shard[elements], len(received))


@also_in("triton", "c")
def decode(message: Tensor, flat: Tensor, block_size: int) -> None:
    """Decodes ``message`` into ``flat``.

    Args:
        message: ``(W, shard_bytes)`` uint8, the ``mean_message`` of every rank.
        flat: ``(n,)`` any floating dtype.
        block_size: elements that share a scale.
    """
    parts = split_for(flat, message, block_size)
    scratch = Scratch.like(parts)
    for elements, codes, scales in stretches(parts, len(scratch.chunk)):
        part = flat[elements]
        whole = is_whole(part, codes)
        blocks = part.view(codes.shape) if whole else scratch.chunk[: len(codes)]
        blocks.copy_(codes).mul_(scales.unsqueeze(1))
        if not whole:
            part.copy_(blocks.view(-1)[: part.numel()])


def is_finite(message: Tensor, block_size: int) -> Tensor:
    """Returns whether all values in ``message`` ``(W, shard_bytes)`` are finite: 0-dim bool, from its scales."""
    return split(message, block_size).scales.amax().isfinite()


@also_in("triton")
def undo(flat: Tensor, residual: Tensor, message: Tensor, finite: Tensor, block_size: int) -> None:
    """Brings ``residual`` back to what it was before `encode`, up to a rounding of ``flat + residual``.

    Args:
        flat: ``(n,)`` as `encode` had it: undo first, then decode the mean over it.
        residual: ``(n,)`` as `encode` left it; updated in place.
        message: ``(W, shard_bytes)`` uint8 as `encode` left it.
        finite: 0-dim bool: whether the step was finite, so that nothing is to be done. On CUDA the host does
            not wait for it.
        block_size: elements that share a scale.
    """
    parts = split_for(flat, message, block_size)
    assert residual.shape == flat.shape
    if finite:
        return
    scratch = Scratch.like(parts)
    for elements, codes, scales in stretches(parts, len(scratch.stretch)):
        sent = scratch.stretch[: len(codes)].copy_(codes).mul_(scales.unsqueeze(1))
        values = sent.view(-1)[: flat[elements].numel()]
        values.add_(residual[elements]).sub_(flat[elements])
        put_finite(sent, scales, residual[elements])


@also_in("triton")
def undo_reduce(
    received: Tensor, mean_message: Tensor, residual_shard: Tensor, finite: Tensor, block_size: int
) -> None:
    """Takes back, up to a rounding, what `reduce` added to ``residual_shard``. To be called before `undo`.

    The mean is computed anew: steps that are finite need no memory for what to take back.

    Args:
        received: ``(W, shard_bytes)`` uint8 as `reduce` had it.
        mean_message: ``(shard_bytes,)`` uint8 as `reduce` left it.
        residual_shard: ``(<= s,)`` as `reduce` left it; updated in place.
        finite: 0-dim bool: whether the step was finite, so that nothing is to be done. On CUDA the host does
            not wait for it.
        block_size: elements that share a scale.
    """
    shares, mean = split(received, block_size), split(mean_message, block_size)
    if finite:
        return
    scratch = Scratch.like(mean)
    for elements, codes, scales in stretches(mean, len(scratch.stretch)):
        lost = average_shares(shares, elements, scratch)
        lost.addcmul_(codes.float(), scales.unsqueeze(1), value=-1)
        add_finite(lost, scales, residual_shard[elements], -len(received))
