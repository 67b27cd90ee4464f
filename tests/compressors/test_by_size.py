"""What holds for BySize only."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt.compressors import BySize, Compressor, Layout, Rounds, State

ALONE: Any = SimpleNamespace(size=1, all_reduce=lambda tensor: tensor)


@dataclass(frozen=True, kw_only=True)
class Doubles(Compressor):
    """Doubles gradients, leaves a residual of 7 for each, and notes in whose memory they were."""

    memories: list[int] = field(default_factory=list)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Any, residual: Tensor | None = None
    ) -> Rounds:
        assert residual is not None
        self.memories.extend(tensor.untyped_storage().data_ptr() for tensor in (flat, residual))
        yield channel.all_reduce(flat.mul_(2))
        residual.fill_(7)

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        return layout.numel * layout.dtype.itemsize


@pytest.mark.parametrize(
    ("numels", "in_one_run"),
    [([3, 20, 30, 4], True), ([20, 30, 4], True), ([3, 20], True), ([20, 3, 30], False), ([20, 3, 30, 4, 5], False)],
)
def test_large_gradients_are_copied_only_if_small_ones_lie_between(numels: list[int], in_one_run: bool) -> None:
    """If it fails, BySize mixes gradients up, or costs two passes where it need not."""
    layout = Layout.of([torch.empty(numel) for numel in numels], torch.float32)
    flat, residual = torch.arange(1.0, layout.numel + 1), torch.full((layout.numel,), 0.5)
    is_large = torch.cat([torch.full((numel,), numel >= 10) for numel in numels])
    before, inner = flat.clone(), Doubles()

    compressor = BySize(inner=inner, min_numel=10)
    for _ in compressor.rounds(flat, layout, compressor.init(layout, flat.device), ALONE, residual):
        pass

    assert flat.equal(torch.where(is_large, 2 * before, before + 0.5))
    assert residual.equal(torch.where(is_large, 7.0, 0.0))
    is_view = inner.memories == [tensor.untyped_storage().data_ptr() for tensor in (flat, residual)]
    assert is_view == in_one_run


def test_a_compressor_of_ones_own_is_lossy_unless_it_says_otherwise() -> None:
    """If it fails, reports call a user's compressor lossless."""
    assert BySize(inner=Doubles(), min_numel=10).is_lossy
