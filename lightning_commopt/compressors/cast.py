"""Averages in a narrower floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Averaged, Compressor, Layout, Rounds, State

if TYPE_CHECKING:
    from lightning_commopt.channel import Channel

_DTYPES = (torch.bfloat16, torch.float16)


@final
@dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """Rounds to ``dtype``, all-reduces, and widens again: half the bytes of float32.

    Lossy: each gradient is rounded once, and partial sums are rounded to ``dtype`` too, once a hop. The share
    of each rank is divided by the number of ranks before it is rounded, so that float16 cannot overflow in the
    sum; a gradient beyond 65504 times the number of ranks still becomes infinite in it.

    Attributes:
        dtype: ``torch.bfloat16`` (float32's range, 8 bits of precision) or ``torch.float16`` (11 bits).

    Raises:
        ValueError: ``dtype`` is neither.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {self.dtype!r}")

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns an empty state."""
        return {}

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Averages in one round; a bucket that is narrow already is sent as it is."""
        scale = 1 / channel.size
        if layout.dtype.itemsize <= self.dtype.itemsize:
            return Averaged((yield channel.all_reduce(flat.mul_(scale))), own=None)
        total = yield channel.all_reduce((flat * scale).to(self.dtype))

        def own() -> Tensor:
            return (flat * scale).to(self.dtype).to(flat.dtype).mul_(channel.size)

        return Averaged(total.to(flat.dtype), own)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns two bytes an element."""
        return layout.numel * min(self.dtype.itemsize, layout.dtype.itemsize)
