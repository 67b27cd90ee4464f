"""Averages in a narrower floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Claims, Compressor, Layout, Rounds, State, in_pieces
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.elementwise import (
    add_lost,
    all_finite,
    convert,
    narrow,
    sum_rows,
    wide_dtype,
    widen,
)
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.text.validation import check_choice


@register_compressor("bf16", aliases=("bfloat16",), dtype=torch.bfloat16)
@register_compressor("fp16", aliases=("float16", "half"), dtype=torch.float16)
@final
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Rounds to ``dtype``, averages, and widens again, which sends half the bytes of float32.

    It is lossy: each gradient is rounded once, and ``accumulate`` decides how often the sum is. Each rank divides its
    gradients by the number of ranks before it rounds them, so that the sum cannot overflow in float16; a gradient
    beyond 65504 times the number of ranks still becomes infinite.

    Attributes:
        dtype: ``torch.bfloat16`` (float32's range, 8 bits of precision) or ``torch.float16`` (11 bits).
        accumulate: None for an all-reduce in ``dtype``, which also rounds the partial sums, once per hop. "float32" for
            an all-to-all, a sum in float32 on the rank that owns the shard, and an all-gather, which send as many bytes
            and round the sum once, however many ranks there are.

    Raises:
        ValueError: ``dtype`` or ``accumulate`` is another value.
    """

    dtype: torch.dtype
    accumulate: str | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, (torch.bfloat16, torch.float16))
        check_choice("accumulate", self.accumulate, (None, "float32"))

    @property
    def claims(self) -> Claims:
        """Each gradient and each sum is rounded once. What is rounded off inside an all-reduce is in no residual."""
        eps = torch.finfo(self.dtype).eps
        untracked_error = Claims.untracked_error if self.accumulate else eps / 2
        return Claims(error_bound=eps, untracked_error=untracked_error, is_recommended=self.dtype == torch.bfloat16)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages in one round, or in two with ``accumulate``. A bucket of 16-bit gradients keeps its dtype."""
        rounds = self._one_round if self.accumulate is None else self._two_rounds
        yield from in_pieces(flat, residual, channel, channel.size, rounds)

    def _one_round(self, flat: Tensor, residual: Tensor | None, channel: Channel) -> Rounds:
        scale, dtype = 1 / channel.size, self._wire_dtype(flat.dtype)
        if residual is None and dtype == flat.dtype:
            yield channel.all_reduce(flat.mul_(scale))
            return
        message = channel.scratch("message", (flat.numel(),), dtype, flat.device)
        narrow(flat, residual, scale, message)
        mean = yield channel.all_reduce(message)
        if residual is None:
            convert(mean, flat)
        else:
            widen(flat, residual, mean, scale, all_finite(mean))

    def _two_rounds(self, flat: Tensor, residual: Tensor | None, channel: Channel) -> Rounds:
        """Averages ``W`` shards of ``s`` elements. The last ones may be padded, or consist of padding only."""
        scale, dtype, n = 1 / channel.size, self._wire_dtype(flat.dtype), flat.numel()
        s = -(-n // channel.size)
        message = channel.scratch("message", (channel.size, s), dtype, flat.device)
        narrow(flat, residual, scale, message.view(-1))
        received = yield channel.all_to_all(message)
        wide = wide_dtype(flat.dtype)
        mean = None if residual is None else channel.scratch("mean", (s,), wide, flat.device)
        rounded = channel.scratch("rounded", (s,), dtype, flat.device)
        sum_rows(received, mean, rounded, wide)
        gathered = (yield channel.all_gather(rounded)).view(-1)[:n]
        if residual is None or mean is None:
            convert(gathered, flat)
        else:
            finite = all_finite(gathered)
            widen(flat, residual, gathered, scale, finite)
            own_shard = residual[channel.rank * s : (channel.rank + 1) * s]
            numel = own_shard.numel()
            add_lost(own_shard, mean[:numel], rounded[:numel], channel.size, finite)

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Returns the average of ``shares`` ``(W, n)``, gradients plus residuals, and what each rank has sent."""
        num_ranks, n = shares.shape
        rounded = (shares / num_ranks).to(self.dtype).to(shares.dtype)
        mean, sent = rounded.sum(0).to(self.dtype).to(shares.dtype), rounded * num_ranks
        if self.accumulate is not None:
            # Each rank knows what was lost by rounding the mean of its own shard, and keeps it for a later step.
            places = torch.arange(n, device=shares.device)
            sent[places // -(-n // num_ranks), places] += num_ranks * (mean - rounded.sum(0))
        return mean, sent

    def why_idle(self, layout: Layout) -> str | None:
        if self.accumulate is None and self._wire_dtype(layout.dtype) == layout.dtype:
            return f"gradients are {str(layout.dtype).removeprefix('torch.')} already"
        return None

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        padded = layout.numel if self.accumulate is None else -(-layout.numel // world_size) * world_size
        return padded * self._wire_dtype(layout.dtype).itemsize

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype.itemsize < dtype.itemsize else dtype
