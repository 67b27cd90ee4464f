"""How a bucket is divided among the ranks of a node, and what a rank keeps of its part."""

import pytest
import torch
from torch import Tensor

from lightning_commopt.compressors import ErrorFeedback, Hierarchical, Layout
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel, Pending
from lightning_commopt.compressors.hierarchical import shards
from support.every_compressor import BF16


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
def test_shards_are_of_about_the_same_size(num: int) -> None:
    """If it fails, one rank of a node sends most of a bucket across nodes, or rows of matrices are cut."""
    layout = Layout.of([torch.zeros(100, 7), torch.zeros(11), torch.zeros(40, 30)], torch.float32)
    found = shards(layout, num)
    starts = [start for start, _ in found]
    assert starts == [sum(part.numel for _, part in found[:i]) for i in range(num)]
    assert sum(part.numel for _, part in found) == layout.numel
    assert all(abs(part.numel - layout.numel / num) <= 30 for _, part in found)
    assert all(start % 7 == 0 for start in starts if start < 700)


_LAYOUT = Layout.of([torch.empty(64)], torch.float32)


@pytest.mark.parametrize("inner_keeps_it", [False, True])
def test_what_a_node_left_out_counts_once(inner_keeps_it: bool) -> None:
    """If it fails, residuals are halved by the mean over a node's ranks, or belong to the part of another rank."""
    compressor = Hierarchical(inner=ErrorFeedback(inner=BF16) if inner_keeps_it else BF16, ranks_per_node=2)
    given = torch.randn(64, generator=torch.Generator().manual_seed(0))
    flat, kept, state = given.clone(), torch.zeros(64), compressor.init(_LAYOUT, given.device)
    channel = AloneChannel(4, 1, AloneChannel(2, 1), AloneChannel(2, 0))  # the second of two ranks on a node
    finish(compressor.rounds(flat, _LAYOUT, state, channel, None if inner_keeps_it else kept))
    residual = compressor.residual(_LAYOUT, state, None if inner_keeps_it else kept)
    assert residual is not None
    assert not residual[:32].any()
    assert residual[32:].abs().max() > 0
    torch.testing.assert_close(residual[32:], 2 * (given - flat)[32:], rtol=0, atol=1e-6)


class _InfiniteFromOther(AloneChannel):
    """The ranks of a node, of which the first has an infinity."""

    def all_gather(self, part: Tensor) -> Pending:
        gathered = super().all_gather(part).wait()
        gathered[0] = torch.inf
        return Pending(gathered, [])


@pytest.mark.parametrize("within", [AloneChannel(2, 1), _InfiniteFromOther(2, 1)])
def test_a_residual_outlives_an_average_that_is_not_finite(within: AloneChannel) -> None:
    """If it fails, the step that a gradient scaler skips loses what was left out before it, or poisons it."""
    compressor, flat, residual = Hierarchical(inner=BF16, ranks_per_node=2), torch.randn(64), torch.ones(64)
    flat[40] = torch.inf if type(within) is AloneChannel else 0.0
    channel = AloneChannel(4, 1, within, AloneChannel(2, 0))
    finish(compressor.rounds(flat, _LAYOUT, compressor.init(_LAYOUT, flat.device), channel, residual))
    assert not flat.isfinite().all()
    assert torch.equal(residual, torch.ones(64))
