"""Steps of optimizers that wrap others."""

import warnings
from typing import Any

import pytest
import torch
from small_fit import NUM_STEPS, Net, fit
from torch import Tensor

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, OuterMomentum, SpeedMonitor
from support.lightnings import MisconfigurationException
from support.warm_ranks import run_ranks


class Several(torch.optim.Optimizer):
    """Steps several optimizers at once and calls no constructor of torch, as one that many projects have copied."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return {key: value for one in self.optimizers for key, value in one.defaults.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss


class TrainedBySeveral(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, _, last = self.layers
        return Several(
            torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9)
        )


class TrainedManually(TrainedBySeveral):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class SharpnessAware(torch.optim.Optimizer):
    """Moves uphill, and steps an optimizer within it from there, as implementations of SAM do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                x += 0.01 * x.grad

    def second_step(self) -> None:
        self.base.step()
        self.zero_grad()


class TrainedSharply(Net):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.first_step()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.second_step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SharpnessAware(super().configure_optimizers())


@pytest.mark.parametrize("net", [TrainedBySeveral, TrainedManually, TrainedSharply])
def test_its_steps_are_measured(net: type[Net]) -> None:
    """If it fails, a callback that only measures ends the fit of such a project, or sees no step in it."""
    comm_time, speed = CommTimeMonitor(num_warmup_steps=0, save_records=False), SpeedMonitor(num_warmup_steps=1)
    fit(comm_time, devices=1, net=net(), callbacks=[speed], max_epochs=1, limit_train_batches=NUM_STEPS)
    assert comm_time.summary["step_s"] > 0
    assert speed.num_steps == NUM_STEPS - 1


def train_with_ours() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = fit(None, CommOptDDP(plan="auto"), net=TrainedManually())
    return [x.detach() for x in net.parameters()]


def test_it_trains_with_our_strategy() -> None:
    first, second = run_ranks(train_with_ours)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], next(Net().parameters()))


def test_outer_momentum_cannot_count_its_steps() -> None:
    with pytest.raises(MisconfigurationException, match="cannot count the steps of Several"):
        fit(None, devices=1, net=TrainedBySeveral(), callbacks=[OuterMomentum(sync_every=2)])
