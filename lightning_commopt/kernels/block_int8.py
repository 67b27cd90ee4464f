"""Arithmetic of an average whose two transfers are int8 with one scale a block.

A rank encodes its gradients, one shard for each peer (`encode`); after an all-to-all it averages its own shard and
rounds the mean again (`reduce`); after an all-gather it has the whole mean (`decode`). The collectives are the
caller's. `undo_reduce` and `undo` bring the residual back when the step turned out not to be finite.

Shapes: ``n`` elements in a bucket, ``W`` ranks, ``B`` elements in a block (a power of two, 4 at least), shards of
``s`` elements: ``n`` rounded up to a multiple of ``W * B``, over ``W``. A message is uint8 ``(W, s + 4 s / B)``, so
that any backend can send it: each row holds the int8 codes of one shard, then its float32 scales. What fills up the
last shards is zero.

Per block, with ``top`` its largest magnitude, in float32 and with one rounding an operation::

    scale = max(top * K, 2**-126), 0 where top is 0    K is 1/127 less 2**-22 of it: 127 * scale never exceeds top
    codes = round(c * (1 / scale))                     half to even, in [-127, 127]

One rounding is off by at most ``0.50005 * scale``, which is at most ``max(top / 253.9, 2**-127)``. The floor keeps
``1 / scale`` finite. A block with a NaN or an infinity has one as its scale, and its codes mean nothing.

Example, B = 4: ``[1, -0.5, 0.1, 0]`` has scale 0.007874 and codes ``[127, -64, 13, 0]``, and decodes to
``[1, -0.5039, 0.1024, 0]``; ``[0, 0.0039, -0.0024, 0]`` stay in the residual.

On CUDA the same in Triton where it is installed. Both forms multiply and add with one rounding where a sum follows a
product, in plain torch wherever its vectors do that (AVX2, AVX-512). There they give the same bits, but for the last
one of a residual; elsewhere means differ in the last bit, and codes by one where ``c / scale`` is half way between two.
Blocks of less than 32 are slow on CPU, where torch does not vectorise maxima over so few.

Source: blocks as in Dettmers et al., 8-bit Optimizers (arXiv:2110.02861), we round evenly, not by a table; two
quantised transfers around a float32 sum as in Wang et al., ZeRO++ (arXiv:2306.10209), we keep what is rounded off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.kernels.chunks import use_triton

SCALE_OF_TOP = (1 / 127) * (1 - 2**-22)
SMALLEST_SCALE = 2.0**-126
ROUNDING_MAGIC = 1.5 * 2.0**23
"""Added to a small float32 it rounds it, half to even, and leaves the integer in the lowest bits."""

# Measured on one core with 1 MiB of second-level and 32 MiB of shared cache, where a call costs 1 to 3 us: parts that
# fit the smaller cache cost more in calls than they save. The dozen calls on scales are made once a stretch.
_STRETCH_NUMEL = 2**20
_CHUNK_NUMEL = 2**19


class Parts(NamedTuple):
    """Views of a message.

    Attributes:
        codes: ``(W, s / B, B)`` int8.
        scales: ``(W, s / B)`` float32.
    """

    codes: Tensor
    scales: Tensor


def shard_numel(numel: int, world_size: int, block_size: int) -> int:
    """Returns ``s``: elements in each shard of a bucket of ``numel``, with what fills it up."""
    return -(-numel // (world_size * block_size)) * block_size


def shard_bytes(numel: int, world_size: int, block_size: int) -> int:
    """Returns the bytes in a row of a message, for a bucket of ``numel`` elements."""
    return shard_numel(numel, world_size, block_size) // block_size * (block_size + 4)


def split(message: Tensor, block_size: int) -> Parts:
    """Returns the parts of ``message``, uint8 ``(W, shard_bytes)``, or ``(shard_bytes,)`` for a single row."""
    assert message.dtype == torch.uint8
    assert block_size >= 4
    assert block_size & (block_size - 1) == 0
    rows = message.view(-1, message.shape[-1])
    num_blocks = rows.shape[1] // (block_size + 4)
    codes, scales = rows.split((num_blocks * block_size, num_blocks * 4), dim=1)
    return Parts(codes.view(torch.int8).unflatten(1, (num_blocks, block_size)), scales.view(torch.float32))


def encode(flat: Tensor, residual: Tensor | None, message: Tensor, block_size: int) -> None:
    """Writes ``c = flat + residual`` to ``message``, one row for each peer; what is rounded off is the new residual.

    Args:
        flat: ``(n,)`` any floating dtype; left as it was. Beyond the range of float32 it counts as infinite.
        residual: ``(n,)`` float32 or bfloat16, or None for zeros that stay zeros. Blocks that are not finite keep it.
        message: ``(W, shard_bytes)`` uint8.
        block_size: elements that share a scale.
    """
    parts = _parts_for(flat, message, block_size)
    assert residual is None or residual.shape == flat.shape
    if use_triton(flat):
        from lightning_commopt.kernels import block_int8_triton

        return block_int8_triton.encode(flat, residual, parts)
    scratch = _Scratch.like(parts)
    for elements, codes, scales in _stretches(parts):
        part = flat[elements]
        owed = None if residual is None else residual[elements]
        corrected = _fill(part, owed, codes, scratch.stretch)
        _find_scales(corrected, scales, scratch)
        if owed is None:
            _round(corrected, codes, scales, scratch, rest=None)
        elif _is_whole(owed, codes) and scales.amax().isfinite():
            _round(corrected, codes, scales, scratch, rest=owed.view(codes.shape))
        else:
            _round(corrected, codes, scales, scratch, rest=corrected)
            _put_finite(corrected, scales, owed)
    return None


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
    if use_triton(received):
        from lightning_commopt.kernels import block_int8_triton

        return block_int8_triton.reduce(shares, mean, residual_shard)
    scratch = _Scratch.like(mean)
    for elements, codes, scales in _stretches(mean):
        average = _average(shares, elements, scratch)
        _find_scales(average, scales, scratch)
        if residual_shard is None:
            _round(average, codes, scales, scratch, rest=None)
        else:
            _round(average, codes, scales, scratch, rest=average)
            _add_finite(average, scales, residual_shard[elements], len(received))
    return None


def decode(message: Tensor, flat: Tensor, block_size: int) -> None:
    """Writes what ``message`` stands for to ``flat``.

    Args:
        message: ``(W, shard_bytes)`` uint8, the ``mean_message`` of every rank.
        flat: ``(n,)`` any floating dtype.
        block_size: elements that share a scale.
    """
    parts = _parts_for(flat, message, block_size)
    if use_triton(flat):
        from lightning_commopt.kernels import block_int8_triton

        return block_int8_triton.decode(parts, flat)
    scratch = _Scratch.like(parts)
    for elements, codes, scales in _stretches(parts, _CHUNK_NUMEL):
        part = flat[elements]
        whole = _is_whole(part, codes)
        blocks = part.view(codes.shape) if whole else scratch.chunk[: len(codes)]
        blocks.copy_(codes).mul_(scales.unsqueeze(1))
        if not whole:
            part.copy_(blocks.view(-1)[: part.numel()])
    return None


def is_finite(message: Tensor, block_size: int) -> Tensor:
    """Returns whether all that ``message`` ``(W, shard_bytes)`` stands for is finite: 0-dim bool, from its scales."""
    return split(message, block_size).scales.amax().isfinite()


def undo(flat: Tensor, residual: Tensor, message: Tensor, finite: Tensor, block_size: int) -> None:
    """Brings ``residual`` back to what it was before `encode`, up to a rounding of ``flat + residual``.

    Args:
        flat: ``(n,)`` as `encode` had it: undo first, then decode the mean over it.
        residual: ``(n,)`` as `encode` left it; updated in place.
        message: ``(W, shard_bytes)`` uint8 as `encode` left it.
        finite: 0-dim bool: whether the step was finite, so that nothing is to be done. On CUDA nobody waits for it.
        block_size: elements that share a scale.
    """
    parts = _parts_for(flat, message, block_size)
    assert residual.shape == flat.shape
    if use_triton(flat):
        from lightning_commopt.kernels import block_int8_triton

        return block_int8_triton.undo(flat, residual, parts, finite)
    if finite:
        return None
    scratch = _Scratch.like(parts)
    for elements, codes, scales in _stretches(parts):
        sent = scratch.stretch[: len(codes)].copy_(codes).mul_(scales.unsqueeze(1))
        values = sent.view(-1)[: flat[elements].numel()]
        values.add_(residual[elements]).sub_(flat[elements])
        _put_finite(sent, scales, residual[elements])
    return None


def undo_reduce(
    received: Tensor, mean_message: Tensor, residual_shard: Tensor, finite: Tensor, block_size: int
) -> None:
    """Takes back, up to a rounding, what `reduce` added to ``residual_shard``. To be called before `undo`.

    The mean is computed anew: steps that are finite need no memory for what to take back.

    Args:
        received: ``(W, shard_bytes)`` uint8 as `reduce` had it.
        mean_message: ``(shard_bytes,)`` uint8 as `reduce` left it.
        residual_shard: ``(<= s,)`` as `reduce` left it; updated in place.
        finite: 0-dim bool: whether the step was finite, so that nothing is to be done. On CUDA nobody waits for it.
        block_size: elements that share a scale.
    """
    shares, mean = split(received, block_size), split(mean_message, block_size)
    if use_triton(received):
        from lightning_commopt.kernels import block_int8_triton

        return block_int8_triton.undo_reduce(shares, mean, residual_shard, finite)
    if finite:
        return None
    scratch = _Scratch.like(mean)
    for elements, codes, scales in _stretches(mean):
        lost = _average(shares, elements, scratch)
        lost.addcmul_(codes.float(), scales.unsqueeze(1), value=-1)
        _add_finite(lost, scales, residual_shard[elements], -len(received))
    return None


class _Scratch(NamedTuple):
    """Memory for one call, in float32.

    Attributes:
        stretch: ``(stretch / B, B)``.
        chunk: ``(chunk / B, B)``.
        inverse: ``(stretch / B,)``.
        lowest: ``(stretch / B,)``.
    """

    stretch: Tensor
    chunk: Tensor
    inverse: Tensor
    lowest: Tensor

    @classmethod
    def like(cls, parts: Parts) -> _Scratch:
        """Returns what one row of ``parts`` needs."""
        _, num_blocks, block_size = parts.codes.shape
        long, short = (min(max(numel // block_size, 1), num_blocks) for numel in (_STRETCH_NUMEL, _CHUNK_NUMEL))
        new = parts.scales.new_empty
        return cls(new(long, block_size), new(short, block_size), new(long), new(long))


def _parts_for(flat: Tensor, message: Tensor, block_size: int) -> Parts:
    """Returns the parts of a ``message`` that is as long as ``flat`` needs."""
    assert message.shape[1] == shard_bytes(flat.numel(), len(message), block_size)
    return split(message, block_size)


def _stretches(parts: Parts, numel: int | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields which elements of the bucket come next, filled up, their codes ``(k, B)`` and their scales ``(k,)``."""
    start = 0
    for row_codes, row_scales in zip(*parts, strict=True):
        num_blocks = max((numel or _STRETCH_NUMEL) // row_codes.shape[1], 1)
        for codes, scales in zip(row_codes.split(num_blocks), row_scales.split(num_blocks), strict=True):
            yield slice(start, start + codes.numel()), codes, scales
            start += codes.numel()


def _is_whole(part: Tensor, codes: Tensor) -> bool:
    """Returns whether ``part`` is in float32 and has an element for each of ``codes``."""
    return part.dtype == torch.float32 and part.numel() == codes.numel()


def _fill(part: Tensor, owed: Tensor | None, codes: Tensor, scratch: Tensor) -> Tensor:
    """Returns ``part + owed`` as ``codes`` ``(k, B)`` needs it: in float32, filled up with zeros.

    It is in ``scratch``, or ``part`` itself where nothing is to be done.
    """
    if owed is None and _is_whole(part, codes):
        return part.view(codes.shape)
    blocks = scratch[: len(codes)]
    values, filling = blocks.view(-1).tensor_split([part.numel()])
    filling.zero_()
    if owed is None:
        values.copy_(part)
    elif part.dtype == owed.dtype == torch.float32:
        torch.add(part, owed, out=values)
    elif part.dtype == torch.float32:
        values.copy_(owed).add_(part)
    else:
        values.copy_(part).add_(owed)
    return blocks


def _find_scales(blocks: Tensor, scales: Tensor, scratch: _Scratch) -> None:
    """Writes the scale of each block to ``scales`` and its inverse to ``scratch.inverse``."""
    # The largest magnitude by two passes that write nothing: abs().amax() is slower, vector_norm(ord=inf) ten times.
    inverse, lowest = scratch.inverse[: len(blocks)], scratch.lowest[: len(blocks)]
    torch.amax(blocks, 1, out=inverse)
    torch.amin(blocks, 1, out=lowest)
    top = torch.maximum(inverse, lowest.neg_(), out=lowest)
    torch.mul(top, SCALE_OF_TOP, out=scales).clamp_min_(SMALLEST_SCALE)
    torch.reciprocal(scales, out=inverse)
    scales.mul_(top.sign_())


def _round(blocks: Tensor, codes: Tensor, scales: Tensor, scratch: _Scratch, rest: Tensor | None) -> None:
    """Writes the codes of ``blocks``, and to ``rest``, which may be ``blocks``, what they leave out."""
    step = len(scratch.chunk)
    magic = scratch.chunk.new_full((1, blocks.shape[1]), ROUNDING_MAGIC)
    inverses = scratch.inverse[: len(blocks)].unsqueeze(1).split(step)
    columns = scales.unsqueeze(1).split(step)
    for index, (chunk, code, inverse) in enumerate(zip(blocks.split(step), codes.split(step), inverses, strict=True)):
        rounded = scratch.chunk[: len(chunk)]
        torch.addcmul(magic, chunk, inverse, out=rounded)
        code.copy_(rounded.view(torch.int32))
        if rest is not None:
            torch.addcmul(chunk, rounded.copy_(code), columns[index], value=-1, out=rest[index * step :][: len(chunk)])


def _average(shares: Parts, elements: slice, scratch: _Scratch) -> Tensor:
    """Returns the mean over ranks of these elements of a shard, ``(k, B)``, in ``scratch.stretch``."""
    world_size, _, block_size = shares.codes.shape
    blocks = slice(elements.start // block_size, elements.stop // block_size)
    step = len(scratch.chunk)
    all_codes = shares.codes[:, blocks].split(step, dim=1)
    all_weights = shares.scales[:, blocks].div(world_size).unsqueeze(2).split(step, dim=1)
    mean = scratch.stretch[: blocks.stop - blocks.start]
    for total, codes, weights in zip(mean.split(step), all_codes, all_weights, strict=True):
        total.copy_(codes[0]).mul_(weights[0])
        share = scratch.chunk[: len(total)]
        for rank in range(1, world_size):
            total.addcmul_(share.copy_(codes[rank]), weights[rank])
    return mean


def _put_finite(blocks: Tensor, scales: Tensor, owed: Tensor) -> None:
    """Writes ``blocks`` ``(k, B)`` to ``owed`` ``(<= k B,)``, but for blocks that are not finite."""
    values = blocks.view(-1)[: owed.numel()]
    if not scales.amax().isfinite():
        finite = scales.isfinite().repeat_interleave(blocks.shape[1])[: owed.numel()]
        values = torch.where(finite, values, owed)
    owed.copy_(values)


def _add_finite(blocks: Tensor, scales: Tensor, owed: Tensor, factor: float) -> None:
    """Adds ``factor * blocks`` ``(k, B)`` to ``owed`` ``(<= k B,)``, but for blocks that are not finite."""
    if not scales.amax().isfinite():
        blocks.masked_fill_(scales.isfinite().logical_not_().unsqueeze(1), 0)
    values = blocks.view(-1)[: owed.numel()]
    if owed.dtype == torch.float32:
        owed.add_(values, alpha=factor)
    else:
        owed.copy_(values.mul_(factor).add_(owed))
