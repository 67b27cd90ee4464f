"""Averages in blocks of int8 or int4 with one scale each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Claims, Compressor, Layout, Rounds, State, in_pieces
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels import blockwise
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo, round_blocks
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.wrappers import ErrorFeedback, Preset
from lightning_commopt.text.validation import check_power_of_two


class Blockwise(Compressor):
    """Averages in two transfers of quantized blocks: the ranks' gradients, then their mean.

    Each rank quantizes one shard for every peer, receives its own shard from all, sums it in float32, quantizes the
    mean, and sends that to all. It is lossy; inside `ErrorFeedback` a later step sends what both roundings left out.
    """

    bits: ClassVar[int]
    block_size: int

    @property
    def block_format(self) -> BlockFormat:
        """Format of the blocks that are sent."""
        return BlockFormat(self.bits, self.block_size)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Sends one shard to each rank, then the mean of this rank's shard to all ranks."""
        yield from in_pieces(flat, residual, channel, channel.size * self.block_format.block_size, self._two_rounds)

    def _two_rounds(self, flat: Tensor, residual: Tensor | None, channel: Channel) -> Rounds:
        block_format, own_shard = self.block_format, None
        shard_numel = block_format.shard_numel(flat.numel(), channel.size)
        row_bytes = block_format.shard_bytes(flat.numel(), channel.size)
        if residual is not None:
            own_shard = residual[channel.rank * shard_numel : (channel.rank + 1) * shard_numel]

        message = channel.scratch("message", (channel.size, row_bytes), torch.uint8, flat.device)
        blockwise.encode(flat, residual, message, block_format)  # leaves the rounding errors in the residual
        received = yield channel.all_to_all(message)
        mean = channel.scratch("mean", (row_bytes,), torch.uint8, flat.device)
        blockwise.reduce(received, mean, own_shard, block_format)  # adds the rounding errors of the mean
        gathered = yield channel.all_gather(mean)

        undo = None
        if residual is not None:
            finite = blockwise.is_finite(gathered, block_format)
            undo = Undo(message, received, mean, residual, channel.rank, finite)
        blockwise.decode(gathered, flat, block_format, undo)

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Returns the average of ``shares`` ``(W, n)``, gradients plus residuals, and what each rank has sent."""
        num_ranks, n = shares.shape
        shard_numel = self.block_format.shard_numel(n, num_ranks)
        padded = torch.nn.functional.pad(shares, (0, num_ranks * shard_numel - n))
        sent = self._round(padded)
        mean = self._round(sent.mean(0))
        # Each rank knows what was lost by rounding the mean of its own shard, and keeps it for a later step.
        places = torch.arange(num_ranks * shard_numel, device=shares.device)
        sent[places // shard_numel, places] += num_ranks * (mean - sent.mean(0))
        return mean[:n], sent[:, :n]

    def _round(self, values: Tensor) -> Tensor:
        rounded = round_blocks(values.reshape(-1, self.block_format.block_size), self.block_format)
        return (rounded.levels * rounded.scales).view_as(values)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes of codes and scales, with the padding of the last blocks."""
        return world_size * self.block_format.shard_bytes(layout.numel, world_size)


@register_compressor("block_int8")
@final
@dataclass(frozen=True, kw_only=True)
class BlockInt8(Blockwise):
    """Int8 with one float32 scale per block.

    Each rounding is off by at most half a scale, which is 1/254 of the largest magnitude in the block. For Gaussian
    gradients the error of the mean is about 0.9 % in the 2-norm. An outlier costs only its own block precision.

    Attributes:
        block_size: number of elements that share a scale, a power of two. Smaller blocks are more exact and send more:
            ``1 + 4 / block_size`` bytes per element, 3 % above int8 alone with the default.

    Raises:
        ValueError: ``block_size`` is not a power of two from 16 to 256.

    Source: see `lightning_commopt.compressors.kernels.blockwise`.
    """

    bits: ClassVar[int] = 8  # per code
    block_size: int = 128

    def __post_init__(self) -> None:
        check_power_of_two("block_size", self.block_size, at_least=16, at_most=256)

    # Blocks of 256, the largest, have an error of 0.010; the bound is twice that.
    claims = Claims(error_bound=0.02, has_c_kernels=True, is_part=True, is_recommended=True)


@register_compressor("block_int4")
@final
@dataclass(frozen=True, kw_only=True)
class BlockInt4(Blockwise):
    """Int4 with one bfloat16 scale per block, and levels that are closer together near zero.

    For Gaussian gradients the error of the mean is about 12 % in the 2-norm.

    Attributes:
        block_size: number of elements that share a scale, a power of two. Smaller blocks are more exact and send more:
            ``4 + 16 / block_size`` bits per element, 4.5 with the default.

    Raises:
        ValueError: ``block_size`` is not a power of two from 32 to 256.

    Source: see `lightning_commopt.compressors.kernels.blockwise`.
    """

    bits: ClassVar[int] = 4  # per code
    block_size: int = 32

    def __post_init__(self) -> None:
        check_power_of_two("block_size", self.block_size, at_least=32, at_most=256)

    # Blocks of 256, the largest, have an error of 0.15.
    claims = Claims(error_bound=0.2, has_c_kernels=True, is_part=True, is_recommended=True)


@register_compressor("int8")
@final
@dataclass(frozen=True, kw_only=True)
class Int8(Preset):
    """Int8: `BlockInt8` within `ErrorFeedback`. These two classes describe the settings."""

    algorithm: ClassVar[type[BlockInt8]] = BlockInt8

    block_size: int = BlockInt8.block_size
    error_feedback: bool = True
    residual_dtype: str = ErrorFeedback.residual_dtype


@register_compressor("int4")
@final
@dataclass(frozen=True, kw_only=True)
class Int4(Preset):
    """Int4: `BlockInt4`, by default without `ErrorFeedback`. These two classes describe the settings.

    Error feedback adds a residual to the gradients before they are rounded, which makes the scales larger. A GPT
    trained with AdamW ended with a lower loss without it, with each of five seeds (docs/evidence/int4.md). But if
    gradients hardly change from step to step, small ones may be rounded to zero in every step without it.
    """

    algorithm: ClassVar[type[BlockInt4]] = BlockInt4

    block_size: int = BlockInt4.block_size
    error_feedback: bool = False
    residual_dtype: str = ErrorFeedback.residual_dtype
