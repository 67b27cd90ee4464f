"""A plan that takes over after gradient sync failed, or a backward was broken off."""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import ErrorFeedback, Layout, LowRank, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.wrappers import Wrapper
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from support.ranks import run_ranks

_FAILS = threading.Event()
_BUCKETS = ["3.weight", "2.weight", "1.weight", "0.weight"]  # one layer in each, the last one first


@dataclass(frozen=True, kw_only=True)
class FailsInTheSecondBucket(Wrapper):
    """Raises between two collectives."""

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return self.inner.init(layout, device, step)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        rounds = self.inner.rounds(flat, layout, state, channel, residual)
        arrived = yield next(rounds)
        if _FAILS.is_set() and layout.shapes == (torch.Size([11, 10]),):
            raise ArithmeticError("no luck")
        pending = rounds.send(arrived)
        with suppress(StopIteration):
            while True:
                pending = rounds.send((yield pending))

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        return self.inner.residual(layout, state, given)


_LOSSY = ErrorFeedback(inner=FailsInTheSecondBucket(inner=LowRank(min_compression_rate=0.1)))


class _Training:
    """Steps of a model of four layers, each in a bucket of its own, whose gradients are the inputs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.sync = GradientSync(CommPlan(comm_hook=_LOSSY))
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self._wrap(nn.Sequential(*(nn.Linear(8 + i, 9 + i, bias=False) for i in range(4))))
        for _ in range(3):  # DDP lays its buckets out anew after the first
            self.step()

    def _wrap(self, module: nn.Module) -> None:
        self.model = DistributedDataParallel(module, bucket_cap_mb=1e-5)
        self.sync.attach(self.model, timeout=None, ranks_per_node=1)

    def residuals(self) -> dict[str, Tensor]:
        state = self.sync.state()
        assert state is not None
        return {name: value.clone() for name, value in state.all_residuals().items()}

    def step(self) -> dict[str, Tensor]:
        """Returns what this rank sent; what it received is in the gradients."""
        sent = {name: torch.randn(p.shape, generator=self.generator) for name, p in self.parameters().items()}
        self.model.zero_grad()
        forward = self.model.module.forward
        self.model.module.forward = lambda: sum((p * sent[name]).sum() for name, p in self.parameters().items())
        try:
            self.model().backward()
        finally:
            self.model.module.forward = forward
        self.sync.end_backward(ends_static_graph=False)
        return sent

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.module.named_parameters())

    def go_on_without_loss(self) -> dict[str, Any]:
        """Returns the warnings of a change of plan, and what the next step lost of gradients and residuals."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.sync.change_plan(CommPlan(), self._wrap)
        residuals = self.residuals()
        means = self.step()
        lost = {}
        for name, value in means.items():
            received = self.parameters()[name].grad
            assert received is not None
            value += residuals.get(name, 0)
            dist.all_reduce(value)
            lost[name] = (received - value / dist.get_world_size()).abs().max().item()
        return {"residuals": residuals, "lost": lost, "warnings": [str(each.message) for each in caught]}


def _raise(gradient: Tensor) -> None:
    raise MemoryError("out of luck")


def _fail_in_compressor(training: _Training) -> None:
    _FAILS.set()
    with pytest.raises(RuntimeError, match="bucket 1 failed"):
        training.step()


def _break_off_in_different_buckets(training: _Training) -> None:
    name = ["2.weight", "3.weight"][dist.get_rank()]  # rank 0 has then sent a bucket that rank 1 never sends
    handle = training.parameters()[name].register_hook(_raise)
    with pytest.raises(MemoryError):
        training.step()
    handle.remove()


def _go_on_after(break_off: Callable[[_Training], None]) -> dict[str, Any]:
    training = _Training()
    before = training.residuals()
    break_off(training)
    return {"before": before, **training.go_on_without_loss()}


@pytest.mark.parametrize(
    ("break_off", "broken", "finished"),
    [
        (_fail_in_compressor, ["2.weight", "2.weight"], ["3.weight"]),
        (_break_off_in_different_buckets, ["3.weight", None], []),
    ],
    ids=["failure", "broken off"],
)
def test_only_residuals_of_broken_buckets_are_lost_and_the_warning_names_them(
    break_off: Callable[[_Training], None], broken: list[str | None], finished: list[str]
) -> None:
    """If it fails, a plan that takes over after a failure drops all that error feedback held back, in silence."""
    for rank, outcome in enumerate(run_ranks(_go_on_after, break_off, group_timeout_s=60)):
        kept = [name for name in _BUCKETS if name != broken[rank]]
        assert sorted(outcome["residuals"]) == sorted(kept)
        for name in kept:
            assert outcome["before"][name].abs().max() > 0.1
            if name not in finished:
                assert torch.equal(outcome["residuals"][name], outcome["before"][name])
        assert max(outcome["lost"].values()) < 1e-6
        about_residuals = [text for text in outcome["warnings"] if "residual" in text]
        expected = (
            f"Rank {rank}: the last gradient sync of {broken[rank]} did not end, so their residuals are lost; the"
            " residuals of other parameters are kept."
        )
        assert about_residuals == ([expected] if broken[rank] else [])
