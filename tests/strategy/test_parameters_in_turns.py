"""Parameters that take turns within the training step, without Lightning's toggling."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.watch import times
from support.lightnings import Callback, DDPStrategy, LightningModule, MisconfigurationException, Trainer
from support.ranks import run_ranks_or_raise
from support.strategy_models import Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks


class _InTurns(LightningModule):
    """Trains one half of the network in even steps and the other in odd ones."""

    def __init__(self, starts_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        if starts_frozen:
            self.halves[1].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for index, half in enumerate(self.halves):
            half.requires_grad_(index == batch_idx % 2)
        return self.halves[1](self.halves[0](batch[0]).tanh()).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(strategy: Any, model: _InTurns, **options: Any) -> np.ndarray:
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
    trainer(strategy, **options).fit(model, DataLoader(data, batch_size=4, num_workers=0))
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])


def _fit_frozen() -> None:
    with pytest.raises(MisconfigurationException, match="A parameter was unfrozen within the training step"):
        _fit(CommOptDDP(find_unused_parameters=True), _InTurns(starts_frozen=True))


class _ChangesPlan(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in (3, 4):  # after a step that has frozen the first half, and after one that has frozen the second
            strategy: Any = trainer.strategy
            strategy.apply_plan("all_reduce" if batch_idx == 3 else "none")


def _fit_in_turns(changes_plan: bool) -> np.ndarray:
    strategy = CommOptDDP(find_unused_parameters=True)
    return _fit(strategy, _InTurns(starts_frozen=False), callbacks=[_ChangesPlan()] if changes_plan else [])


def test_plan_changes_while_a_part_is_frozen() -> None:
    """If it fails, parts that take turns are trained by each rank alone, or a new plan leaves out the frozen one."""
    first, second = run_ranks(_fit_in_turns, True)
    np.testing.assert_array_equal(first, second)
    for unchanged in run_ranks(_fit_in_turns, False):
        np.testing.assert_array_equal(first, unchanged)


class _Growing(Tiny):
    """Has another last layer of its own initial weights on each rank from the second epoch on, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.extra is None else super().forward(x) + self.extra(x)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)
            self.layers[4], self.extra = nn.Sequential(nn.Linear(24, 2), nn.Linear(2, 1)), nn.Linear(6, 1)
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": [*self.layers[4].parameters(), *self.extra.parameters()]})


def _fit_growing() -> list[Params]:
    fits = []
    for options in ({}, {"comm_hook": "all_reduce"}, {"comm_hook": "int8", "bucket_cap_mb": 0.001}):
        model = _Growing()
        trainer(CommOptDDP(**options), max_epochs=3).fit(model, loader())
        fits.append(numbers(model))
    return fits


def test_layers_that_a_hook_adds_or_replaces_are_trained_together() -> None:
    """If it fails, each rank trains such a layer by itself, silently, or waits for one that is gone."""
    first, second = run_ranks(_fit_growing)
    for params, others in zip(first, second, strict=True):
        assert_same(params, others)
    assert_same(first[1], first[0])
    assert_same(first[2], first[0], rtol=0.2)


class _GrowingOnOneRank(_Growing):
    """Adds layers on rank 1 only."""

    def on_train_epoch_start(self) -> None:
        if self.global_rank == 1:
            super().on_train_epoch_start()


def _fit_growing_on_one_rank() -> None:
    with patch.object(times, "FIT_LOOK_S", 0.1), patch.object(times, "STALLED_S", 0.3):
        trainer(CommOptDDP()).fit(_GrowingOnOneRank(), loader())


def test_layers_that_one_rank_adds_are_named_on_all() -> None:
    """If it fails, a rank waits in vain for others to train layers that only it has, or a process aborts."""
    for _, trace in run_ranks_or_raise(_fit_growing_on_one_rank, world_size=2):
        assert trace is not None
        assert "layers.4.0.weight" in trace
        assert "on this rank, but nothing on rank 0" in trace


class _KeepsBest(Tiny):
    """Copies its layers in an epoch that each rank chooses for itself, as a baseline in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.best = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 + self.global_rank:
            self.best = copy.deepcopy(self.layers)


def _fit_with_best(make_strategy: Callable[[], Any], max_epochs: int) -> Params:
    model = _KeepsBest()
    trainer(make_strategy(), max_epochs=max_epochs).fit(model, loader())
    return numbers(model)


def test_copies_that_a_rank_makes_for_itself_are_left_alone() -> None:
    """If it fails, a rank waits in vain for others to have its copy trained, which DDPStrategy leaves as it is."""
    of_lightning = run_ranks(_fit_with_best, DDPStrategy, 3)
    for actual, expected in zip(run_ranks(_fit_with_best, CommOptDDP, 3), of_lightning, strict=True):
        assert_same(actual, expected)


def test_copies_of_some_ranks_with_diloco() -> None:
    """If it fails, a fit with DiLoCo hangs if one rank makes a copy, or ends with an error or with different copies."""
    first, second = run_ranks(_fit_with_best, CommOptDiLoCo, 2)
    assert_same(first, second)


def test_unfrozen_within_a_step_is_refused() -> None:
    """If it fails, a parameter that DDP does not know of is trained by each rank by itself, silently."""
    run_ranks(_fit_frozen)
