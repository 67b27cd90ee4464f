"""`CommOptModelParallel` in Fabric: what travels, changes of plan, and its state in checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_commopt import CommPlan, OptionError, ShardedPlan, shard
from lightning_commopt.fabric import CommOptModelParallel
from support.cross_section import sampled
from support.warm_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 takes other collectives from torch 2.9 on"
)
_FEEDBACK = {"name": "int8", "error_feedback": True, "block_size": 16}
Trained = dict[str, np.ndarray]


def _parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    shard(module, mesh, blocks=500)
    return module


class _Training:
    """A model and its optimizer in Fabric; data depend on the step and the rank only."""

    def __init__(self, strategy: Any) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))
        self.model = self.fabric.setup_module(model)
        self.optimizer: Any = self.fabric.setup_optimizers(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        )
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 * self.state["step"] + self.fabric.global_rank)
            x = torch.randn(8, 16, generator=generator)
            self.fabric.backward((self.model(x) - x.mean()).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state["step"] += 1

    def trained(self) -> Trained:
        parameters: Any = self.model.named_parameters()
        return {name: value.full_tensor().detach().numpy().copy() for name, value in parameters}


def _train(plans: list[Any], **options: Any) -> tuple[Trained, list[int | None]]:
    strategy = CommOptModelParallel(_parallelize, 2, 1, **options)
    training, sent = _Training(strategy), []
    for plan in plans:
        training.train(3)
        sent.append(strategy.wire_bytes)
        if plan is not None:
            strategy.apply_plan(plan)
    return training.trained(), sent


def _train_stock() -> Trained:
    training = _Training(ModelParallelStrategy(_parallelize, 2, 1))
    training.train(6)
    return training.trained()


def _all_plans() -> dict[str, tuple[Trained, list[int | None]]]:
    return {
        "stock": (_train_stock(), []),
        "none": _train([None, None]),
        "int8": _train([None, None], comm_hook="int8"),
        "to int8": _train(["int8", None]),
        "from feedback": _train(["none", None], comm_hook=_FEEDBACK),
        "of ddp": _train([CommPlan(comm_hook="int8"), None]),  # type: ignore[arg-type]
        "parameters": _train([None, None], param_hook="int8"),
    }


def test_plans_train_and_change() -> None:
    """If it fails, Fabric's users get other gradients than they asked for."""
    for found in run_ranks(_all_plans, limit_s=120):
        stock = found["stock"][0]
        for name, value in found["none"][0].items():
            np.testing.assert_array_equal(value, stock[name])
        assert found["none"][1] == [None, None]
        for name in ("int8", "to int8", "from feedback", "of ddp", "parameters"):
            off = max(np.abs(value - stock[key]).max() for key, value in found[name][0].items())
            assert 0 < off < 0.02, name
        first, second = found["int8"][1]
        assert second == 2 * first > 0
        assert found["to int8"][1] == found["of ddp"][1] == [None, first]
        for name, value in found["of ddp"][0].items():
            np.testing.assert_array_equal(value, found["to int8"][0][name])


def _save(folder: Path, distributed: bool) -> Trained:
    strategy = CommOptModelParallel(_parallelize, save_distributed_checkpoint=distributed, comm_hook=_FEEDBACK)
    training = _Training(strategy)
    training.train(3)
    training.fabric.save(folder / "saved", training.state)
    training.train(3)
    return training.trained()


def _resume(folder: Path, distributed: bool, plan: Any) -> Trained:
    training = _Training(CommOptModelParallel(_parallelize, 2, 1, distributed, plan=plan))
    training.fabric.load(folder / "saved", training.state)
    assert training.state["step"] == 3
    training.train(3)
    return training.trained()


@pytest.mark.parametrize("distributed", sampled([True, False], by_default=[True]))
def test_resumed_training_goes_on_bit_for_bit(distributed: bool, tmp_path: Path) -> None:
    """If it fails, residuals are lost where a run is resumed, or their place in the checkpoint is not read."""
    through = run_ranks(_save, tmp_path, distributed)
    same = ShardedPlan.from_dict({"comm_hook": _FEEDBACK})
    for before, after in zip(through, run_ranks(_resume, tmp_path, distributed, same), strict=True):
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": ShardedPlan(accumulate_grads="unsharded")}, "no_backward_sync decides"),
        ({"bucket_cap_mb": 25}, "bucket_cap_mb is an option of DDP"),
        ({"comm_hook": "powersgd"}, "averages whole gradients"),
        ({"plan": "auto"}, "not available for sharded models in Fabric"),
        ({"lossy": ["int8"]}, "unknown option 'lossy'; known options: comm_hook"),
    ],
    ids=str,
)
def test_values(options: dict[str, Any], message: str) -> None:
    """If it fails, an option that cannot apply is ignored."""
    with pytest.raises(OptionError, match=message):
        CommOptModelParallel(_parallelize, **options)
