"""Averages in int8 with one scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.pieces import in_pieces
from lightning_commopt.compressors.preset import Preset, with_feedback
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.kernels import block_int8, int8_message
from lightning_commopt.validation import check_power_of_two

if TYPE_CHECKING:
    from lightning_commopt.collectives.channel import Channel


@register_compressor("block_int8")
@final
@dataclass(frozen=True, kw_only=True)
class BlockInt8(Compressor):
    """Rounds to int8 with one float32 scale a block, twice: each rank's gradients, and their mean.

    Each rank quantizes one shard for every peer, receives its own shard from all, sums it in float32, quantizes the
    mean again, and sends that to all. Lossy: each rounding is off by at most half a scale, 1/254 of the largest
    magnitude in the block; of Gaussian gradients the mean is off by about 0.9 % in the 2-norm. An outlier costs the
    precision of its own block only. Meant to stand inside `ErrorFeedback`, which sees both roundings.

    Attributes:
        block_size: elements that share a scale, a power of two. Smaller is more exact and sends more: ``1 + 4 /
            block_size`` bytes an element.

    Raises:
        ValueError: ``block_size`` is not a power of two from 16 to 256.

    Source: see `lightning_commopt.kernels.block_int8`.
    """

    block_size: int = 128

    def __post_init__(self) -> None:
        check_power_of_two("block_size", self.block_size, at_least=16, at_most=256)

    @property
    def has_c_kernels(self) -> bool:
        """True."""
        return True

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns an empty state."""
        return {}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Sends one shard to each rank, then the mean of the own shard to all."""
        yield from in_pieces(flat, residual, channel, channel.size * self.block_size, self._two_rounds)

    def _two_rounds(self, flat: Tensor, residual: Tensor | None, channel: Channel) -> Rounds:
        size, own_shard = self.block_size, None
        shard_numel = int8_message.shard_numel(flat.numel(), channel.size, size)
        row_bytes = int8_message.shard_bytes(flat.numel(), channel.size, size)
        if residual is not None:
            own_shard = residual[channel.rank * shard_numel : (channel.rank + 1) * shard_numel]

        message = channel.scratch("message", (channel.size, row_bytes), torch.uint8, flat.device)
        block_int8.encode(flat, residual, message, size)  # leaves the rounding errors in the residual
        received = yield channel.all_to_all(message)
        mean = channel.scratch("mean", (row_bytes,), torch.uint8, flat.device)
        block_int8.reduce(received, mean, own_shard, size)  # and those of the mean
        gathered = yield channel.all_gather(mean)

        if residual is not None and own_shard is not None:
            finite = block_int8.is_finite(gathered, size)
            block_int8.undo_reduce(received, mean, own_shard, finite, size)
            block_int8.undo(flat, residual, message, finite, size)
        block_int8.decode(gathered, flat, size)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns one byte an element and four a block, with what fills up the last blocks."""
        return world_size * int8_message.shard_bytes(layout.numel, world_size, self.block_size)


@register_compressor("int8")
@final
@dataclass(frozen=True, kw_only=True)
class Int8(Preset):
    """Int8 as it is used: `BlockInt8` with `ErrorFeedback`.

    Attributes:
        block_size: elements that share a scale, a power of two from 16 to 256.
        error_feedback: send later what a step rounded off.
        residual_dtype: of what is sent later, "float32" or "bfloat16".

    Raises:
        ValueError: a setting is out of range.
    """

    block_size: int = 128
    error_feedback: bool = True
    residual_dtype: str = "float32"

    def _build(self) -> Compressor:
        return with_feedback(BlockInt8(block_size=self.block_size), self.error_feedback, self.residual_dtype)
