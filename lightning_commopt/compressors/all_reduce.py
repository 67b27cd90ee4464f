"""The uncompressed average, which every other compressor is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from lightning_commopt.compressors.base import Claims, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.elementwise import all_finite
from lightning_commopt.compressors.registry import register_compressor


@register_compressor("all_reduce")
@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Compressor):
    """Averages the bucket uncompressed, in its dtype and with DDP's arithmetic, which scales before summing."""

    claims = Claims(is_lossy=False)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        if residual is not None:
            flat.add_(residual)
        yield channel.all_reduce(flat.mul_(1 / channel.size))
        if residual is not None:
            residual.masked_fill_(all_finite(flat).all(), 0)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return layout.numel * layout.dtype.itemsize


UNCOMPRESSED = AllReduce()
