"""A compressor in which nothing waits for the device, as with Triton's kernels, which cannot run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commopt.compressors import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.base import Claims
from lightning_commopt.compressors.channel import Channel


@dataclass(frozen=True, kw_only=True)
class Halves(Compressor):
    """Sends half of each gradient, and the other half in later steps; its state has a quarter of what is left."""

    claims: ClassVar[Claims] = Claims(error_bound=1.0, keeps_residual=True)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"quarter": torch.zeros(layout.numel, device=device)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        flat.add_(state["quarter"], alpha=4)
        if residual is not None:
            flat.add_(residual)
        flat.mul_(0.5 / channel.size)
        torch.mul(flat, channel.size / 4, out=state["quarter"])
        yield channel.all_reduce(flat)

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        return state["quarter"] * 4

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return 4 * layout.numel
