"""Blocks of numbers with one scale each: their formats, the messages of `blockwise`, and rounding in plain torch.

Shapes: ``n`` elements in a bucket; ``W`` ranks; ``B`` elements in a block, a power of two of at least 4; ``s`` elements
in a shard, ``n`` rounded up to a multiple of ``W * B`` and divided by ``W``. A message is uint8 ``(W, shard_bytes)``,
so that any backend can send it: each row holds the codes of one shard, then its scales. The padding of the last shards
is zero. Plain torch works on a chunk of ``k`` blocks at a time; the codes of a block take ``C`` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels.elementwise import CHUNK_NUMEL

MIN_SCALE = 2.0**-126
"""The smallest normal float32, whose inverse is finite."""
ROUNDING_MAGIC = 1.5 * 2.0**23
"""Adding this to a small float32 rounds it, half to even, and leaves the integer in the lowest bits."""
INT4_CURVE = 4
"""``c`` of the levels of int4, ``k (|k| + c)``: 0 gives squares, a large number evenly spaced levels. How these levels
compare with others is in ``docs/evidence/int4.md``."""
INT4_OFFSET = INT4_CURVE**2 / 4 - 1 / 4
"""The root of a magnitude plus this, less half of `INT4_CURVE`, rounds to the code of the nearest level."""
MAX_CODE_4 = 7
"""The largest of the signed 4-bit integers, which are -8 to 7."""


class Parts(NamedTuple):
    """Views of a message."""

    codes: Tensor  # ``(W, s / B, B)`` int8, or ``(W, s / B, B / 2)`` int8 with two codes in each
    scales: Tensor  # ``(W, s / B)`` float32, or bfloat16


class Undo(NamedTuple):
    """Everything that is needed to restore a residual if the step turns out not to be finite."""

    message: Tensor  # ``(W, shard_bytes)``, from `encode`
    received: Tensor  # ``(W, shard_bytes)``, the argument of `reduce`
    mean_message: Tensor  # ``(shard_bytes,)``, from `reduce`
    residual: Tensor  # ``(n,)``, which both have updated; restored in place
    rank: int  # this rank, whose shard `reduce` averaged
    finite: Tensor  # bools, all true if the step was finite; on CUDA the host does not wait for them


class BlockFormat(NamedTuple):
    """How a block is written.

    8 bits: codes from -127 to 127, which are the levels, and a float32 scale. 4 bits: codes ``k`` from -8 to 7 for the
    levels ``k (|k| + 4)``, and a bfloat16 scale; the lower half of each byte is a code of the block's first half.
    """

    bits: int  # bits per code, 8 or 4
    block_size: int  # number of elements that share a scale, ``B``

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.bits == 8 else torch.bfloat16

    @property
    def code_bytes(self) -> int:
        return self.block_size * self.bits // 8

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + self.scale_dtype.itemsize

    @property
    def scale_of_top(self) -> float:
        """Scale of a block divided by its largest magnitude, rounded down so that no decoded magnitude is larger."""
        return (1 - 2**-22) / (127 if self.bits == 8 else 8 * (8 + INT4_CURVE))

    def shard_numel(self, numel: int, world_size: int) -> int:
        """Returns ``s``, the number of elements in each shard of a bucket of ``numel`` elements, with padding."""
        return -(-numel // (world_size * self.block_size)) * self.block_size

    def shard_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes in a row of a message for a bucket of ``numel`` elements."""
        return self.shard_numel(numel, world_size) // self.block_size * self.block_bytes

    def split(self, message: Tensor) -> Parts:
        """Returns the parts of ``message``, uint8 ``(W, shard_bytes)``, or ``(shard_bytes,)`` for a single row."""
        assert message.dtype == torch.uint8
        assert self.block_size >= 4
        assert self.block_size & (self.block_size - 1) == 0
        rows = message.view(-1, message.shape[-1])
        num_blocks = rows.shape[1] // self.block_bytes
        sizes = (num_blocks * self.code_bytes, num_blocks * self.scale_dtype.itemsize)
        codes, scales = rows.split(sizes, dim=1)
        return Parts(codes.view(torch.int8).unflatten(1, (num_blocks, self.code_bytes)), scales.view(self.scale_dtype))

    def split_for(self, flat: Tensor, message: Tensor) -> Parts:
        """Returns the parts of a ``message``, which must be as long as ``flat`` requires."""
        assert message.shape[1] == self.shard_bytes(flat.numel(), len(message))
        return self.split(message)


class Rounded(NamedTuple):
    """Blocks after rounding, which decode to ``levels * scales``."""

    codes: Tensor  # ``(k, C)`` int8, as in a message
    levels: Tensor  # ``(k, B)`` float32, the levels of the codes
    scales: Tensor  # ``(k, 1)`` float32; not finite if the block is not


def round_blocks(blocks: Tensor, block_format: BlockFormat, out: Tensor | None = None) -> Rounded:
    """Rounds ``blocks`` ``(k, B)`` of float32 as the docstring of `blockwise` defines; writes the levels to ``out``."""
    scales, inverse = _find_scales(blocks, block_format)
    # With a row as its first argument addcmul is fast, and rounds once.
    row = blocks.new_empty(1, block_format.block_size)
    if block_format.bits == 8:
        rounded = torch.addcmul(row.fill_(ROUNDING_MAGIC), blocks, inverse, out=out)
        codes = rounded.view(torch.int32).to(torch.int8)
        return Rounded(codes, rounded.sub_(ROUNDING_MAGIC), scales)
    squares = torch.addcmul(row.fill_(INT4_OFFSET), blocks.abs(), inverse, out=out)
    # The float32 root of torch's vector library has an error of one bit for some numbers.
    rounded = squares.copy_(squares.double().sqrt_()).sub_(INT4_CURVE / 2).copysign_(blocks).mul_(scales.sign())
    first, second = rounded.clamp_max_(MAX_CODE_4).add_(ROUNDING_MAGIC).view(torch.int32).chunk(2, dim=1)
    codes = ((first & 15) | (second << 4)).to(torch.int8)
    return Rounded(codes, _level(rounded.sub_(ROUNDING_MAGIC)), scales)


def _find_scales(blocks: Tensor, block_format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Returns the scales ``(k, 1)`` and the inverses of their magnitudes."""
    # These two passes write nothing; abs().amax() is slower, and vector_norm(ord=inf) takes ten times as long.
    highest, lowest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    top = torch.maximum(highest, -lowest)
    scales = (top * block_format.scale_of_top).clamp_min_(MIN_SCALE)
    if block_format.bits == 8:
        return scales * top.sign(), scales.reciprocal()
    truncated = (scales.view(torch.int32) & -0x10000).view(torch.float32)  # the upper 16 bits are a bfloat16
    scales = torch.where(top < torch.inf, truncated, top)
    is_turned = (highest >= -lowest) & (top > 0) & (top < torch.inf)
    return torch.where(is_turned, -scales, scales) * top.sign(), scales.reciprocal()


def _level(codes: Tensor) -> Tensor:
    """Returns the levels of 4-bit ``codes``, in place."""
    return codes.mul_(codes.abs().add_(INT4_CURVE))


def read_levels(codes: Tensor, block_format: BlockFormat) -> Tensor:
    """Returns the levels ``(k, B)``, float32, of ``codes`` ``(k, C)``, int8."""
    if block_format.bits == 8:
        return codes.float()
    return _level(torch.cat([(codes << 4) >> 4, codes >> 4], dim=1).float())


def chunks(parts: Parts, block_size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Iterates over all blocks of a message, one chunk at a time.

    Yields:
        The slice of the bucket with its padding, the codes ``(k, C)`` and the scales ``(k,)``.
    """
    start, num_blocks = 0, max(CHUNK_NUMEL // block_size, 1)
    for row_codes, row_scales in zip(*parts, strict=True):
        for codes, scales in zip(row_codes.split(num_blocks), row_scales.split(num_blocks), strict=True):
            yield slice(start, start + len(codes) * block_size), codes, scales
            start += len(codes) * block_size


def new_chunks(num: int, parts: Parts, block_size: int) -> Tensor:
    """Returns memory for chunks, ``(num, k, B)`` float32; new memory for each would cost as much as the arithmetic."""
    num_blocks = min(max(CHUNK_NUMEL // block_size, 1), parts.scales.shape[1])
    return torch.empty(num, num_blocks, block_size, dtype=torch.float32, device=parts.codes.device)


def fill(part: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``part + residual`` in ``out`` ``(k, B)``, float32, padded with zeros."""
    values, rest = out.view(-1).tensor_split([part.numel()])
    rest.zero_()
    if residual is None:
        values.copy_(part)
    else:
        torch.add(part.float(), residual, out=values)
    return out


def average_shares(shares: Parts, elements: slice, block_format: BlockFormat) -> Tensor:
    """Returns the mean ``(k, B)`` over the ranks of some elements of a shard."""
    blocks = slice(elements.start // block_format.block_size, elements.stop // block_format.block_size)
    weights = shares.scales[:, blocks].float().div(len(shares.scales)).unsqueeze(2)
    mean = read_levels(shares.codes[0, blocks], block_format).mul_(weights[0])
    for codes, weight in zip(shares.codes[1:, blocks], weights[1:], strict=True):
        mean.addcmul_(read_levels(codes, block_format), weight)
    return mean


def put_rest(blocks: Tensor, rounded: Rounded, residual: Tensor) -> None:
    """Writes what rounding has left out of ``blocks`` to ``residual``, except for blocks that are not finite."""
    is_whole = residual.dtype == blocks.dtype and residual.numel() == blocks.numel()
    if is_whole and rounded.scales.amax().isfinite():
        torch.addcmul(blocks, rounded.levels, rounded.scales, value=-1, out=residual.view_as(blocks))
    else:
        put_finite(blocks.addcmul(rounded.levels, rounded.scales, value=-1), rounded.scales, residual)


def put_finite(blocks: Tensor, scales: Tensor, residual: Tensor) -> None:
    """Writes ``blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, except for blocks that are not finite."""
    values = blocks.view(-1)[: residual.numel()]
    if not scales.amax().isfinite():
        finite = scales.view(-1).isfinite().repeat_interleave(blocks.shape[1])[: residual.numel()]
        values = torch.where(finite, values, residual)
    residual.copy_(values)


def add_finite(blocks: Tensor, scales: Tensor, residual: Tensor, factor: float) -> None:
    """Adds ``factor * blocks`` ``(k, B)`` to ``residual`` ``(<= k B,)``, except for blocks that are not finite."""
    if not scales.amax().isfinite():
        blocks = blocks.masked_fill(~scales.view(-1, 1).isfinite(), 0)
    values = blocks.view(-1)[: residual.numel()]
    if residual.dtype == torch.float32:
        residual.add_(values, alpha=factor)
    else:
        residual.copy_((values * factor).add_(residual))
