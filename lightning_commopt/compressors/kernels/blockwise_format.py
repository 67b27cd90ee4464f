"""Formats of blocks of numbers with one scale each, and the messages that `blockwise` makes of them.

Shapes: ``n`` elements in a bucket, ``W`` ranks, ``B`` elements in a block (a power of two, 4 at least), shards of
``s`` elements: ``n`` rounded up to a multiple of ``W * B``, over ``W``. A message is uint8 ``(W, shard_bytes)``, so
that any backend can send it: each row holds the codes of one shard, then its scales. What fills up the last shards
is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_SCALE = 2.0**-126
ROUNDING_MAGIC = 1.5 * 2.0**23
"""Added to a small float32 it rounds it, half to even, and leaves the integer in the lowest bits."""
INT4_CURVE = 4
"""``c`` of the levels of int4, ``k (|k| + c)``: 0 for squares, large for even levels."""
INT4_OFFSET = INT4_CURVE**2 / 4 - 1 / 4
MAX_CODE_4 = 7


class Parts(NamedTuple):
    """Views of a message.

    Attributes:
        codes: ``(W, s / B, B)`` int8, or ``(W, s / B, B / 2)`` int8 with two codes in each.
        scales: ``(W, s / B)`` float32, or bfloat16.
    """

    codes: Tensor
    scales: Tensor


class Undo(NamedTuple):
    """What brings a residual back when the step turned out not to be finite.

    Attributes:
        message: ``(W, shard_bytes)`` as `encode` left it.
        received: ``(W, shard_bytes)`` as `reduce` had it.
        mean_message: ``(shard_bytes,)`` as `reduce` left it.
        residual: ``(n,)`` as both left it; updated in place.
        rank: whose shard `reduce` averaged.
        finite: bools, all true if the step was finite, so that nothing is to be done. On CUDA the host does not wait
            for them.
    """

    message: Tensor
    received: Tensor
    mean_message: Tensor
    residual: Tensor
    rank: int
    finite: Tensor


class BlockFormat(NamedTuple):
    """How a block is written.

    8 bits: codes from -127 to 127, which stand for themselves, and a float32 scale. 4 bits: codes from -8 to 7, which
    stand for ``k (|k| + 4)``, and a bfloat16 scale; the lower half of each byte is a code of the block's first half.

    Attributes:
        bits: of a code, 8 or 4.
        block_size: elements that share a scale, ``B``.
    """

    bits: int
    block_size: int

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
        """Scale of a block over its largest magnitude, a little less than exact: no decoded magnitude exceeds that."""
        return (1 - 2**-22) / (127 if self.bits == 8 else 8 * (8 + INT4_CURVE))

    def shard_numel(self, numel: int, world_size: int) -> int:
        """Returns ``s``: elements in each shard of a bucket of ``numel``, with what fills it up."""
        return -(-numel // (world_size * self.block_size)) * self.block_size

    def shard_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes in a row of a message, for a bucket of ``numel`` elements."""
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
        """Returns the parts of a ``message`` that is as long as ``flat`` needs."""
        assert message.shape[1] == self.shard_bytes(flat.numel(), len(message))
        return self.split(message)
