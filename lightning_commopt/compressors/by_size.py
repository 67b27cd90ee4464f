"""Compresses large gradients only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.registry import EXAMPLE, register_compressor
from lightning_commopt.compressors.wrappers import Wrapper
from lightning_commopt.text.validation import check_integer


@register_compressor("by_size")
@final
@dataclass(frozen=True, kw_only=True)
class BySize(Wrapper):
    """Compresses the gradients that have at least ``min_numel`` elements, and averages the others uncompressed.

    Attributes:
        inner: the compressor for the large gradients.
        min_numel: minimum number of elements of a large gradient.

    Raises:
        ValueError: ``inner`` is not a compressor, or ``min_numel`` is below 1.
    """

    min_numel: int = field(metadata={EXAMPLE: 100})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("min_numel", self.min_numel, at_least=1)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"inner": self.inner.init(layout.select(self._is_large(layout)), device, step)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        is_large = self._is_large(layout)
        if all(is_large):
            return (yield from self.inner.rounds(flat, layout, state["inner"], channel, residual))
        is_small = [not large for large in is_large]
        parts = [(is_large, self.inner, state["inner"]), (is_small, UNCOMPRESSED, {})]
        for mask, compressor, part_state in parts:
            if any(mask):
                gradients = _gather(flat, layout, mask)
                selected = None if residual is None else _gather(residual, layout, mask)
                yield from compressor.rounds(gradients, layout.select(mask), part_state, channel, selected)
                if _adjacent_slice(layout, mask) is None:
                    _scatter(gradients, flat, layout, mask)
                    if residual is not None and selected is not None:
                        _scatter(selected, residual, layout, mask)
        return None

    def why_idle(self, layout: Layout) -> str | None:
        is_large = self._is_large(layout)
        if not any(is_large):
            return f"no gradient has min_numel={self.min_numel} elements"
        return self.inner.why_idle(layout.select(is_large))

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        is_large = self._is_large(layout)
        sent = self.inner.wire_bytes(layout.select(is_large), world_size) if any(is_large) else 0
        return sent + UNCOMPRESSED.wire_bytes(layout.select([not large for large in is_large]), world_size)

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        is_large = self._is_large(layout)
        large = None if given is None else _gather(given, layout, is_large)
        large = self.inner.residual(layout.select(is_large), state["inner"], large)
        if large is None:
            return None
        residual = large.new_zeros(layout.numel) if given is None else given
        _scatter(large, residual, layout, is_large)
        return residual

    def _is_large(self, layout: Layout) -> list[bool]:
        return [numel >= self.min_numel for numel in layout.numels]


def _adjacent_slice(layout: Layout, mask: list[bool]) -> slice | None:
    """Returns the slice of the selected gradients if they are adjacent in the bucket, else None."""
    selected = [index for index, is_selected in enumerate(mask) if is_selected]
    if not selected:
        return slice(0, 0)
    first, last = selected[0], selected[-1]
    if last - first >= len(selected):
        return None
    return slice(layout.offsets[first], layout.offsets[last] + layout.numels[last])


def _gather(flat: Tensor, layout: Layout, mask: list[bool]) -> Tensor:
    """Returns the selected gradients of a bucket, concatenated: a view if they are adjacent, else a copy."""
    run = _adjacent_slice(layout, mask)
    if run is not None:
        return flat[run]
    return torch.cat([part for part, is_selected in zip(flat.split(layout.numels), mask, strict=True) if is_selected])


def _scatter(selected: Tensor, flat: Tensor, layout: Layout, mask: list[bool]) -> None:
    """Writes the selected gradients of a bucket back."""
    places = [part for part, is_selected in zip(flat.split(layout.numels), mask, strict=True) if is_selected]
    for place, values in zip(places, selected.split([len(place) for place in places]), strict=True):
        place.copy_(values)
