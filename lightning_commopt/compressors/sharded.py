"""Ways to average gradients whose shards belong to ranks: in bfloat16, and in blocks of int8 or int4.

They do half of what compressors for DDP do: each rank sends one message to the owner of each shard, and the owner adds
up all messages in float32. Gradients are rounded once, and the mean is not.

Shapes: ``W`` ranks; a shard has ``s`` elements, the concatenated columns of one or several parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_
from lightning_commopt.compressors.base import Claims, Rounds, State
from lightning_commopt.compressors.blockwise import BlockInt4, BlockInt8
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels import blockwise
from lightning_commopt.compressors.kernels.blockwise_format import MIN_SCALE, BlockFormat
from lightning_commopt.compressors.kernels.elementwise import sum_rows
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.shards import ShardedCompressor
from lightning_commopt.text.validation import check_switch

_RESIDUAL_FORMAT = BlockFormat(8, BlockInt8.block_size)
"""Format of residuals: int8, in blocks of `BlockInt8`'s default size. Rounding to it loses about 1 % of a residual."""


@register_compressor("bf16")
@final
@dataclass(frozen=True, kw_only=True)
class ShardedBf16(ShardedCompressor):
    """Sends gradients in bfloat16 and sums them in float32.

    A reduce-scatter in bfloat16 would also round the partial sums, once per hop.
    """

    claims = Claims(error_bound=torch.finfo(torch.bfloat16).eps)

    def rounds(self, columns: list[Tensor], means: list[Tensor], state: State, channel: Channel) -> Rounds:
        widths = [part.shape[1] for part in columns]
        device, shape = columns[0].device, (channel.size, sum(widths))
        message = channel.scratch("message", shape, torch.bfloat16, device)
        foreach_copy_(message.split(widths, 1), columns)
        received = yield channel.all_to_all(message)
        mean = channel.scratch("mean", shape[1:], torch.float32, device)
        sum_rows(received, None, mean, torch.float32)
        foreach_copy_(means, mean.div_(channel.size).split(widths))

    def message_bytes(self, numel: int, world_size: int) -> int:
        return world_size * numel * torch.bfloat16.itemsize


@final
@dataclass(frozen=True, kw_only=True)
class ShardedExact(ShardedCompressor):
    """Sends gradients uncompressed; the first step adds the residual of the compressor that it takes over from."""

    claims = Claims(is_lossy=False, keeps_residual=True)

    def rounds(self, columns: list[Tensor], means: list[Tensor], state: State, channel: Channel) -> Rounds:
        widths = [part.shape[1] for part in columns]
        message = channel.scratch("message", (channel.size, sum(widths)), columns[0].dtype, columns[0].device)
        foreach_copy_(message.split(widths, 1), columns)
        if (given := state.pop("given", None)) is not None:
            message.add_(given)
        mean = yield channel.reduce_scatter(message)
        foreach_copy_(means, mean.div_(channel.size).split(widths))

    def message_bytes(self, numel: int, world_size: int) -> int:
        return world_size * numel * torch.float32.itemsize

    def residual(self, state: State, numel: int, world_size: int) -> Tensor | None:
        return state.get("given")

    def set_residual(self, state: State, residual: Tensor) -> None:
        state["given"] = residual


class ShardedBlockwise(ShardedCompressor):
    """Sends gradients in quantized blocks with one scale each, and sums them in float32.

    With ``error_feedback`` each rank keeps what was rounded off as int8 in blocks of 128 with a float32 scale each, and
    sends it in the next step. That takes ``1 + 1 / 32`` bytes per element of the unsharded gradients; a residual in
    float32 would be as large as the whole model on every rank. Rounding the residual loses about 1 % of it. Blocks with
    a NaN or an infinity keep their residual. In a step that a gradient scaler skips, the residual that was sent is
    lost.

    This differs from the quantized all-to-all with sums in high precision of Wang et al., "ZeRO++" (arXiv:2306.10209),
    in the error feedback, which they do not have.
    """

    bits: ClassVar[int]
    block_size: int
    error_feedback: bool

    @property
    def block_format(self) -> BlockFormat:
        """Format of the blocks that are sent."""
        return BlockFormat(self.bits, self.block_size)

    def init(self, numel: int, world_size: int, device: torch.device, seed: int = 0) -> State:
        if not self.error_feedback:
            return {}
        num_bytes = _RESIDUAL_FORMAT.shard_bytes(world_size * self._filled(numel), 1)
        return {"residual": torch.zeros(1, num_bytes, dtype=torch.uint8, device=device)}

    def rounds(self, columns: list[Tensor], means: list[Tensor], state: State, channel: Channel) -> Rounds:
        widths = [part.shape[1] for part in columns]
        numel, block_format, device = sum(widths), self.block_format, columns[0].device
        widths.append(self._filled(numel) - numel)
        shape = channel.size, self._filled(numel)
        rows = channel.scratch("rows", shape, columns[0].dtype, device)
        *parts, filling = rows.split(widths, 1)
        foreach_copy_(parts, columns)
        filling.zero_()
        self._before_rounding(rows, state)

        residual = None
        if self.error_feedback:
            residual = channel.scratch("residual", (rows.numel(),), torch.float32, device)
            blockwise.decode(state["residual"], residual, _RESIDUAL_FORMAT)
        row_bytes = block_format.shard_bytes(rows.numel(), channel.size)
        message = channel.scratch("message", (channel.size, row_bytes), torch.uint8, device)
        blockwise.encode(rows.view(-1), residual, message, block_format)  # leaves the rounding errors in the residual
        if residual is not None:
            blockwise.encode(residual, None, state["residual"], _RESIDUAL_FORMAT)
        received = yield channel.all_to_all(message)
        mean = channel.scratch("mean", shape[1:], torch.float32, device)
        blockwise.average(received, mean, block_format)
        foreach_copy_(means, mean.split(widths)[:-1])

    def message_bytes(self, numel: int, world_size: int) -> int:
        """Returns the bytes of codes and scales, with the padding of the last block of each shard."""
        return world_size * self.block_format.shard_bytes(numel, 1)

    def residual(self, state: State, numel: int, world_size: int) -> Tensor | None:
        if "residual" not in state:
            return None
        flat = torch.empty(world_size * self._filled(numel), dtype=torch.float32, device=state["residual"].device)
        blockwise.decode(state["residual"], flat, _RESIDUAL_FORMAT)
        return flat.view(world_size, -1)[:, :numel]

    def set_residual(self, state: State, residual: Tensor) -> None:
        filled = torch.nn.functional.pad(residual, (0, self._filled(residual.shape[1]) - residual.shape[1]))
        blockwise.encode(filled.view(-1), None, state["residual"], _RESIDUAL_FORMAT)

    def _filled(self, numel: int) -> int:
        return self.block_format.shard_numel(numel, 1)

    def _before_rounding(self, rows: Tensor, state: State) -> None:
        """Changes this rank's gradients ``(W, s)``, which are padded to whole blocks, before they are rounded."""


@register_compressor("int8")
@final
@dataclass(frozen=True, kw_only=True)
class ShardedInt8(ShardedBlockwise):
    """Int8 with one float32 scale per block. For Gaussian gradients the error of the mean is about 0.6 % in the 2-norm.

    Attributes:
        block_size: see `BlockInt8`.
        error_feedback: see `ShardedBlockwise`.
        stochastic_rounding: round up or down at random, so that the mean over many steps is exact. The error of a
            single step is 1.4 times as large.

    Raises:
        ValueError: a setting is out of range, or ``error_feedback`` and ``stochastic_rounding`` are both true.
    """

    bits: ClassVar[int] = BlockInt8.bits
    block_size: int = BlockInt8.block_size
    error_feedback: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        BlockInt8(block_size=self.block_size)
        check_switch("error_feedback", self.error_feedback)
        check_switch("stochastic_rounding", self.stochastic_rounding)
        if self.error_feedback and self.stochastic_rounding:
            raise ValueError(
                "error_feedback=True and stochastic_rounding=True exclude each other: stochastic rounding is unbiased"
                " without a residual"
            )

    @property
    def claims(self) -> Claims:
        return Claims(error_bound=0.02, untracked_error=1e-4, keeps_residual=self.error_feedback, has_c_kernels=True)

    def init(self, numel: int, world_size: int, device: torch.device, seed: int = 0) -> State:
        if self.stochastic_rounding:
            return {"seed": torch.tensor(seed, dtype=torch.int64, device="cpu")}
        return super().init(numel, world_size, device)

    def _before_rounding(self, rows: Tensor, state: State) -> None:
        """Rounds gradients stochastically to levels of their block, which `encode` then represents exactly.

        Blocks that are not finite stay so.
        """
        if not self.stochastic_rounding:
            return
        seed = int(state["seed"])
        state["seed"].add_(1)
        blocks = rows.view(-1, self.block_size)
        top = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True)).float()
        scale = (top * self.block_format.scale_of_top).clamp_min_(MIN_SCALE)
        levels = torch.addcdiv(uniform_noise(blocks, seed), blocks.float(), scale).floor_().clamp_(-127, 127)
        blocks.copy_(levels.mul_(scale))


@register_compressor("int4")
@final
@dataclass(frozen=True, kw_only=True)
class ShardedInt4(ShardedBlockwise):
    """Int4 with one bfloat16 scale per block. For Gaussian gradients the error of the mean is about 9 % in the 2-norm.

    Attributes:
        block_size: see `BlockInt4`.
        error_feedback: see `ShardedBlockwise`.

    Raises:
        ValueError: a setting is out of range.
    """

    bits: ClassVar[int] = BlockInt4.bits
    block_size: int = BlockInt4.block_size
    error_feedback: bool = False

    def __post_init__(self) -> None:
        BlockInt4(block_size=self.block_size)
        check_switch("error_feedback", self.error_feedback)

    @property
    def claims(self) -> Claims:
        return Claims(error_bound=0.15, untracked_error=1e-3, keeps_residual=self.error_feedback, has_c_kernels=True)


def uniform_noise(like: Tensor, seed: int) -> Tensor:
    """Returns random float32 numbers in [0, 1), with the shape and device of ``like``, different for each 64-bit seed.

    The CPU's generator uses only 32 bits of its seed. So each half of the mixed seed gives a sequence, and the result
    is the fractional part of their sum. Two seeds differ in at least one half, and therefore in the sum.

    Source: the mixing, which is one-to-one, and its constants are the SplitMix64 of Steele et al., "Fast Splittable
    Pseudorandom Number Generators", 2014.
    """
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    mixed ^= mixed >> 31
    options: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    low, high = (
        torch.rand(like.shape, generator=torch.Generator(like.device).manual_seed(half), **options)
        for half in (mixed % 2**32, mixed >> 32)
    )
    return low.add_(high).frac_()
