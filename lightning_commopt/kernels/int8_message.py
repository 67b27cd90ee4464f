"""Messages of int8 codes with one float32 scale a block, as `block_int8` sends them.

Shapes: ``n`` elements in a bucket, ``W`` ranks, ``B`` elements in a block (a power of two, 4 at least), shards of
``s`` elements: ``n`` rounded up to a multiple of ``W * B``, over ``W``. A message is uint8 ``(W, s + 4 s / B)``, so
that any backend can send it: each row holds the int8 codes of one shard, then its float32 scales. What fills up the
last shards is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCALE_OF_TOP = (1 / 127) * (1 - 2**-22)
SMALLEST_SCALE = 2.0**-126
ROUNDING_MAGIC = 1.5 * 2.0**23
"""Added to a small float32 it rounds it, half to even, and leaves the integer in the lowest bits."""


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


def split_for(flat: Tensor, message: Tensor, block_size: int) -> Parts:
    """Returns the parts of a ``message`` that is as long as ``flat`` needs."""
    assert message.shape[1] == shard_bytes(flat.numel(), len(message), block_size)
    return split(message, block_size)
