"""Compressors of users, as tests derive them."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.compressors import AllReduce, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel


class Averages(Compressor):
    """Averages as `AllReduce` does."""

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        yield from AllReduce().rounds(flat, layout, state, channel, residual)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return AllReduce().wire_bytes(layout, world_size)
