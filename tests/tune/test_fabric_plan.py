"""Loops on Fabric with plan="auto" on real ranks: what it chooses, and that training is what it would be without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_commopt.fabric import CommOptDDP
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync import groups
from lightning_commopt.tune import tuner as tuner_module
from support.cross_section import sampled
from support.ranks import run_ranks
from support.scripted_tuning import scripted

NUM_STEPS = 120
_SMALL, _LARGE = CommPlan(bucket_cap_mb=0.001), CommPlan(bucket_cap_mb=100)
_MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate": 3}),
    "unused": ({"find_unused_parameters": True}, {"skips": True}),
    "static graph": ({"static_graph": True}, {}),
    "bucket view": ({"gradient_as_bucket_view": True}, {}),
    "two optimizers": ({}, {"num_optimizers": 2}),
    "two optimizers in turns": ({"find_unused_parameters": True}, {"num_optimizers": 2, "takes_turns": True}),
}
Trained = list[np.ndarray]


class Net(nn.Module):
    """Three layers, and one that not every batch needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.sometimes = nn.Linear(6, 1)

    def forward(self, x: Tensor, uses_all: bool = True) -> Tensor:
        return self.layers(x) + self.sometimes(x) if uses_all else self.layers(x)


class Loop:
    """A loop as users write it; data depend on the step and the rank only."""

    def __init__(self, strategy: Any, num_optimizers: int = 1) -> None:
        self.strategy = strategy
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        self.fabric.launch()
        self.set_up(num_optimizers)

    def set_up(self, num_optimizers: int = 1) -> None:
        net = Net()
        parts = [net] if num_optimizers == 1 else [net.layers, net.sometimes]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in parts]
        self.model, *self.optimizers = self.fabric.setup(net, *optimizers)
        self.generator = torch.Generator().manual_seed(1 + self.fabric.global_rank)

    def train(
        self, num_steps: int = NUM_STEPS, accumulate: int = 1, skips: bool = False, takes_turns: bool = False
    ) -> Trained:
        for step in range(num_steps):
            for optimizers in [[one] for one in self.optimizers] if takes_turns else [self.optimizers]:
                for batch in range(accumulate):
                    x = torch.randn(8, 6, generator=self.generator)
                    with self.fabric.no_backward_sync(self.model, enabled=batch + 1 < accumulate):
                        loss = (self.model(x, uses_all=not (skips and step % 2)) - x[:, :1]).square().mean()
                        self.fabric.backward(loss / accumulate)
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
        return [parameter.detach().numpy().copy() for parameter in self.model.parameters()]


def _assert_same(trained: Trained, other: Trained) -> None:
    for mine, theirs in zip(trained, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def _train_modes(modes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in modes:
        arguments, options = _MODES[name]
        num_optimizers = options.get("num_optimizers", 1)
        options = {key: value for key, value in options.items() if key != "num_optimizers"}
        base = CommPlan(**arguments)
        faster, slower = (CommPlan.from_dict({**base.to_dict(), **plan.to_dict()}) for plan in (_SMALL, _LARGE))
        logged: list[str] = []
        with scripted({faster: 0.7, slower: 1.1}) as steps, patch.object(tuner_module, "info", logged.append):
            strategy = CommOptDDP(plan="auto", **arguments)
            trained = Loop(strategy, num_optimizers).train(**options)
        found[name] = {
            "trained": trained,
            "ddp": Loop(DDPStrategy(**arguments), num_optimizers).train(**options),
            "has_chosen": strategy.plan == faster,
            "tuning": strategy.auto_plan.describe(),
            "num_plans": len({*steps}),
            "num_steps": strategy.auto_plan._num_steps,
            "logged": logged,
        }
    return found


@pytest.mark.parametrize("mode", sampled(_MODES, by_default=["two optimizers"]))
def test_it_chooses_and_trains_the_same_bits(mode: str) -> None:
    """If it fails, tuning loses or repeats gradients, takes a part of a step for one, or logs too much or nothing."""
    for rank, results in enumerate(run_ranks(_train_modes, [mode])):
        result = results[mode]
        _assert_same(result["trained"], result["ddp"])
        assert result["has_chosen"], result["tuning"]
        assert result["num_plans"] == 3
        assert result["num_steps"] == NUM_STEPS - 1
        assert bool(result["tuning"]) == (rank == 0)
        assert len(result["logged"]) == 2 * (rank == 0)
        if rank == 0:
            assert result["tuning"]["status"] == "faster"
            begins, ends = result["logged"]
            assert begins.startswith("plan='auto': A search begins, of at most 49 steps. Your plan is uncompressed")
            assert ends == f"plan='auto': {result['tuning']['verdict']}"
            assert "Chosen after" in result["tuning"]["verdict"]


def _train_lossy(folder: str) -> dict[str, Any]:
    int8 = CommPlan.from_dict({"comm_hook": "int8"})
    found: dict[str, Any] = {}
    with scripted({int8: 0.6}), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = Loop(CommOptDDP(plan="auto", lossy=["int8", "bf16"]))
        found["trained"] = loop.train(2 * NUM_STEPS)
        found["chosen"] = loop.strategy.plan.name
        loop.fabric.save(Path(folder, "last"), {"model": loop.model, "optimizer": loop.optimizers[0]})
        for lossy in (["int8"], "never"):
            again = Loop(CommOptDDP(plan="auto", lossy=lossy))
            again.fabric.load(Path(folder, "last"), {"model": again.model, "optimizer": again.optimizers[0]})
            again.train(3)
            found[f"resumed {lossy}"] = again.strategy.plan.name, again.strategy.auto_plan.describe().get("status")
        found["early warnings"] = [str(one.message) for one in caught if "plan='auto'" in str(one.message)]
        with patch.object(tuner_module, "error_limit", lambda compressor: 0.0):
            guarded = Loop(CommOptDDP(plan="auto", lossy=["int8"]))
            guarded.train(2 * NUM_STEPS)
        found["guarded"] = guarded.strategy.plan.name
        found["warnings"] = [str(one.message) for one in caught if "averages with comm_hook" in str(one.message)]
    return found


@pytest.mark.exhaustive
def test_lossy_where_allowed(tmp_path: Path) -> None:
    """If it fails, a compressor is not used, not guarded, or not kept in a checkpoint, or ranks drift apart."""
    first, second = run_ranks(_train_lossy, str(tmp_path))
    _assert_same(second["trained"], first["trained"])
    assert all(np.isfinite(values).all() for values in first["trained"])
    for rank in (first, second):
        assert rank["chosen"] == rank["resumed ['int8']"][0] == "int8"
        assert rank["resumed never"][0] == rank["guarded"] == "uncompressed"
        assert rank["early warnings"] == []
    assert first["resumed ['int8']"][1] == "resumed"
    assert first["resumed never"][1] == "measuring"
    assert len(first["warnings"]) == 1


def _train_one_after_another() -> dict[str, Any]:
    kept = []
    with scripted({_SMALL: 0.7, _LARGE: 1.1}):
        loop = Loop(CommOptDDP(plan="auto"))
        early = loop.model, loop.optimizers
        loop.set_up()
        while loop.strategy.plan != _SMALL:
            loop.train(1)
        if loop.fabric.global_rank == 0:
            kept.append(loop.model)
        loop.set_up()
        loop.train(2)
        between = loop.strategy.plan
        loop.set_up()
        trained, chosen = loop.train(), loop.strategy.plan
        loop.model, loop.optimizers = early
        loop.train(3)
        pools = groups._pools[groups.default_group()].values()
    plain = Loop(DDPStrategy()).train()
    sync = loop.strategy._syncs.attached()[0]
    return {
        "trained": trained,
        "ddp": plain,
        "plans": [plan.name for plan in (between, chosen, loop.strategy.plan, sync.plan)],
        "status": loop.strategy.auto_plan.describe().get("status"),
        "num_groups": max(map(len, pools)),
    }


@pytest.mark.exhaustive
def test_modules_that_are_trained_one_after_another() -> None:
    """If it fails, a plan that was tried stays, ranks wait where one keeps an earlier module, or connections add up."""
    ranks = run_ranks(_train_one_after_another)
    for result in ranks:
        _assert_same(result["trained"], result["ddp"])
        assert result["plans"] == ["uncompressed", *[_SMALL.name] * 3]
        assert result["num_groups"] == 1
    assert [result["status"] for result in ranks] == ["resumed", None]


def _train_two_modules() -> tuple[Trained, str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = CommOptDDP(plan="auto")
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        pairs = []
        for module in (nn.Linear(6, 6), nn.Linear(6, 1)):
            pairs.append(fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)))
        for _ in range(4):
            fabric.backward(pairs[1][0](pairs[0][0](torch.randn(4, 6))).square().mean())
            for _, optimizer in pairs:
                optimizer.step()
    messages = [str(one.message) for one in caught if "plan='auto'" in str(one.message)]
    trained = [parameter.detach().numpy() for module, _ in pairs for parameter in module.parameters()]
    return trained, strategy.plan.name, messages


@pytest.mark.exhaustive
def test_two_modules_at_once_are_left_as_they_are() -> None:
    """If it fails, a loop with two modules ends in an error, or is tuned by the steps of one of them."""
    (first, plan, messages), (second, _, others) = run_ranks(_train_two_modules)
    _assert_same(first, second)
    assert plan == "uncompressed"
    assert len(messages) == 1
    assert "is for one module, but a step of this loop trains 2" in messages[0]
    assert others == []


def _train_oddly(folder: str) -> tuple[list[bool], int]:
    with scripted({_SMALL: 0.7}):
        loop = Loop(CommOptDDP(plan="auto"))
        loop.train()
        with torch.no_grad():
            loop.model(torch.zeros(8, 6))
        loop.train(2)
        loop.fabric.save(Path(folder, "saved"), {"model": loop.model})
        loop.train(2)
        spans = loop.strategy.auto_plan._tuner._timer._spans
        ahead = Loop(CommOptDDP(plan="auto"))
        ahead.model, optimizer = ahead.fabric.setup(line := nn.Linear(6, 1), torch.optim.SGD(line.parameters(), lr=0.1))
        loss = ahead.model(torch.ones(2, 6)).mean()
        for _ in range(NUM_STEPS):
            ahead.fabric.backward(loss)
            loss = ahead.model(torch.ones(2, 6)).mean()
            optimizer.step()
    return [counts for _, _, counts in spans[-5:]], ahead.strategy.auto_plan._num_steps


@pytest.mark.exhaustive
def test_steps_with_more_than_training(tmp_path: Path) -> None:
    """If it fails, a validation or a checkpoint is timed, or a plan changes while a backward is still to come."""
    for counts, num_steps_ahead in run_ranks(_train_oddly, str(tmp_path)):
        assert counts == [True, False, True, False, True]
        assert num_steps_ahead == 0
