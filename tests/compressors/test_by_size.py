"""What holds for BySize only."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import BySize, Int4, Layout, PowerSGD, Rounds, State
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.testing.steps import Net, flatten, random_gradients, send
from support.own_compressors import Averages
from support.ranks import run_ranks

ALONE: Any = SimpleNamespace(size=1, all_reduce=lambda tensor: tensor)


@dataclass(frozen=True, kw_only=True)
class Doubles(Averages):
    """Doubles gradients, leaves a residual of 7 for each, and notes in whose memory they were."""

    memories: list[int] = field(default_factory=list)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Any, residual: Tensor | None = None
    ) -> Rounds:
        assert residual is not None
        self.memories.extend(tensor.untyped_storage().data_ptr() for tensor in (flat, residual))
        yield channel.all_reduce(flat.mul_(2))
        residual.fill_(7)


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
    assert BySize(inner=Doubles(), min_numel=10).claims.is_lossy


def _steps_of_two_plans() -> tuple[list[float], list[float]]:
    wrappers = []

    def wrap(module: nn.Module) -> None:
        wrappers.append(DistributedDataParallel(module))
        sync.attach(wrappers[-1], timeout=None, ranks_per_node=1)

    def step(number: int) -> None:
        gradients = random_gradients(number, dist.get_rank())
        received.add_(flatten(send(wrappers[-1], gradients)))
        sent.add_(flatten(gradients))
        sync.end_backward(ends_static_graph=False)

    received, sent = torch.zeros(2, sum(p.numel() for p in Net().parameters()), dtype=torch.float64)
    sync = GradientSync(CommPlan(comm_hook=Int4(error_feedback=True)))
    wrap(Net())
    for number in range(3):
        step(number)
    sync.change_plan(CommPlan(comm_hook=BySize(inner=PowerSGD(), min_numel=500)), wrap)
    for number in range(3, 6):
        step(number)
    rest = sync.detach()
    residual = flatten({name: rest.get(name, torch.zeros_like(p)) for name, p in Net().named_parameters()})
    missing = sent - residual
    dist.all_reduce(missing)
    return received.tolist(), (missing / dist.get_world_size()).tolist()


def test_residuals_of_another_plan_are_sent_for_small_gradients_too() -> None:
    """If it fails, a change of plan drops what error feedback has held back of small gradients."""
    for received, sent in run_ranks(_steps_of_two_plans):
        assert received == pytest.approx(sent, abs=1e-4)
