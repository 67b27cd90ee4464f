"""``CommOptModelParallel``: what is reduced while gradients are accumulated, and that the same is trained."""

import logging
import re
from collections import Counter
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_commopt import CommOptModelParallel
from lightning_commopt.strategy.adapters import ADAPTERS, adapter_for
from support.collectives import counted_collectives, needs_hooks
from support.cross_section import sampled
from support.lightnings import PACKAGE, ModelParallelStrategy
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.warm_ranks import run_ranks

_ACCUMULATED, _STEPS = 4, 3
_BATCHES = _ACCUMULATED * _STEPS


class _Sharded(Tiny):
    """One unit of FSDP2, over all ranks, or over pairs of ranks that are replicas of each other."""

    def __init__(self, num_replicas: int = 1) -> None:
        super().__init__()
        self.num_replicas = num_replicas

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            num_ranks = dist.get_world_size()
            shape = (num_ranks,) if self.num_replicas == 1 else (self.num_replicas, num_ranks // self.num_replicas)
            names = ("replicas", "shards")[-len(shape) :]
            fully_shard(self, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _fit(strategy: Any, num_replicas: int, **options: Any) -> tuple[Counter[str], Params]:
    model = _Sharded(num_replicas)
    run = trainer(strategy, max_epochs=1, accumulate_grad_batches=_ACCUMULATED, **options)
    with torch.random.fork_rng(), counted_collectives(all_groups=True) as counted:
        run.fit(model, loader(_BATCHES * 4 * dist.get_world_size()), loader(8) if run.num_sanity_val_steps else None)
    assert run.global_step == _STEPS
    return counted, {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


def _fit_in_each_way(num_replicas: int, options: dict[str, Any]) -> list[tuple[Counter[str], Params]]:
    sizes: dict[str, Any] = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    strategies = [
        ModelParallelStrategy(**sizes),
        CommOptModelParallel(**sizes),
        CommOptModelParallel(**sizes, accumulate_grads="unsharded"),
    ]
    return [_fit(strategy, num_replicas, **options) for strategy in strategies]


def _reduced(counted: Counter[str]) -> tuple[int, int]:
    scattered = sum(number for name, number in counted.items() if name.startswith("REDUCE_SCATTER"))
    return scattered, counted["ALLREDUCE"]


@needs_hooks
@pytest.mark.parametrize("options", sampled([{}, {"gradient_clip_val": 0.5}], by_default=[{}]), ids=str)
def test_reduce_scatters_of_accumulated_gradients(options: dict[str, Any]) -> None:
    """If it fails, every batch is reduce-scattered, or the sums over batches differ by more than rounding."""
    for (stock, expected), (sharded, same), (unsharded, close) in run_ranks(_fit_in_each_way, 1, options):
        assert [_reduced(counted)[0] for counted in (stock, sharded, unsharded)] == [_BATCHES, _BATCHES, _STEPS]
        assert_same(same, expected)
        assert any((close[name] != values).any() for name, values in _initial().items())
        assert_same(close, expected, rtol=1e-6)


@pytest.mark.exhaustive
@needs_hooks
def test_all_reduces_between_replicas() -> None:
    """If it fails, replicas are averaged in every batch, although that of the last one is enough."""
    for (stock, expected), (sharded, close), (unsharded, closer) in run_ranks(_fit_in_each_way, 2, {}, world_size=4):
        assert [_reduced(counted)[0] for counted in (stock, sharded, unsharded)] == [_BATCHES, _BATCHES, _STEPS]
        assert _reduced(stock)[1] - _reduced(sharded)[1] == _BATCHES - _STEPS
        assert _reduced(sharded)[1] == _reduced(unsharded)[1]
        assert_same(close, expected, rtol=1e-6)
        assert_same(closer, expected, rtol=1e-6)


def _initial() -> Params:
    return {name: value.numpy() for name, value in _Sharded().state_dict().items()}


def _printed(num_replicas: int) -> list[str]:
    records: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    rank_zero.log.addHandler(Collecting())
    rank_zero.log.setLevel(logging.INFO)
    strategy = CommOptModelParallel(dist.get_world_size(), 1, accumulate_grads="unsharded")
    _fit(strategy, num_replicas, num_sanity_val_steps=1)  # which leaves parameters gathered
    return [text for text in records if "accumulate_grads" in text]


@needs_hooks
@pytest.mark.parametrize(
    ("num_replicas", "world_size", "num_shards"), sampled([(1, 2, 2), (2, 4, 2)], by_default=[(1, 2, 2)])
)
def test_the_memory_is_printed_once(num_replicas: int, world_size: int, num_shards: int) -> None:
    """If it fails, the option costs memory that nobody was told of, or another number of bytes."""
    num_bytes = 4 * sum(value.size for value in _initial().values())
    first, *others = run_ranks(_printed, num_replicas, world_size=world_size)
    (text,) = first
    found = [float(number) for number in re.findall(r"([0-9.]+) MB", text)]
    np.testing.assert_allclose(found, [num_bytes / 1e6, num_bytes / num_shards / 1e6], rtol=0.05)
    assert others == [[]] * len(others)


@pytest.mark.parametrize("package", ADAPTERS)
def test_the_trainer_of_the_other_package(package: str) -> None:
    """If it fails, a program that imports both packages cannot use the strategy with one of them."""
    (other,) = set(ADAPTERS) - {package}
    strategy = adapter_for(other, "CommOptModelParallel")(2, 1, accumulate_grads="unsharded")
    made = import_module(package).Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    assert type(made.strategy) is adapter_for(package, "CommOptModelParallel")
    assert isinstance(made.strategy, import_module(f"{package}.strategies").ModelParallelStrategy)
    assert (made.strategy._data_parallel_size, made.strategy.plan.accumulate_grads == "unsharded") == (2, True)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_cli(tmp_path: Any) -> None:
    """If it fails, LightningCLI cannot make the strategy or set its options."""
    pytest.importorskip("jsonargparse")
    made = import_module(f"{PACKAGE}.cli").LightningCLI(
        Tiny,
        args=[
            "--trainer.strategy=lightning_commopt.CommOptModelParallel",
            "--trainer.strategy.accumulate_grads=unsharded",
            "--trainer.accelerator=cpu",
        ],
        run=False,
        save_config_callback=None,
        trainer_defaults={"barebones": True},
    )
    assert type(made.trainer.strategy) is adapter_for(PACKAGE, "CommOptModelParallel")
    assert made.trainer.strategy.plan.accumulate_grads == "unsharded"
