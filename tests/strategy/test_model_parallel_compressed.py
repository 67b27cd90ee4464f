"""``CommOptModelParallel(comm_hook=...)``: what travels, and that training goes on as it should."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from lightning_commopt import CommOptModelParallel, OptionError, shard
from lightning_commopt.compressors.sharded import ShardedInt8
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.lightnings import LightningModule, ModelParallelStrategy, callbacks
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.warm_ranks import run_ranks


class _Sharded(Tiny):
    """Two linear layers are units, the third is the rest; or all in replicas of two ranks."""

    def __init__(self, num_replicas: int = 1, replicated: bool = False) -> None:
        super().__init__()
        self.num_replicas, self.replicated = num_replicas, replicated

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if self.num_replicas > 1:
            shape = (self.num_replicas, dist.get_world_size() // self.num_replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        shard(self, mesh, blocks=150, replicated=self.replicated)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _fit(strategy: Any, num_replicas: int = 1, replicated: bool = False, **options: Any) -> Params:
    model = _Sharded(num_replicas, replicated)
    run = trainer(strategy, max_epochs=2, **options)
    with torch.random.fork_rng():
        run.fit(model, loader(32 * dist.get_world_size()))
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


class _StepsOnly(LightningModule):
    """The same layers in a module without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Tiny().layers

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=150)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    configure_optimizers = Tiny.configure_optimizers
    lr = Tiny.lr


class _PastForward(_Sharded):
    """Uses a part of itself, and not its forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.layers(batch[0]), batch[1])


def _fit_without_forward() -> tuple[Params, Params, str]:
    expected = _fit(CommOptModelParallel(comm_hook="int8"))
    model = _StepsOnly()
    run = trainer(CommOptModelParallel(comm_hook="int8"), max_epochs=2, limit_val_batches=2)
    with torch.random.fork_rng():
        run.fit(model, loader(32 * dist.get_world_size()), loader(32))
    try:
        trainer(CommOptModelParallel(2, 1), max_epochs=1).fit(_PastForward(), loader(32))
    except RuntimeError as error:
        explanation = str(error)
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}, expected, explanation


@pytest.mark.exhaustive
@takes_collectives
def test_parameters_are_gathered_without_a_forward() -> None:
    """If it fails, a LightningModule whose steps call a part of it cannot be sharded, or nothing explains why."""
    for got, expected, explanation in run_ranks(_fit_without_forward):
        assert_same(got, expected)
        assert "call self(...) in training_step" in explanation


def _average_weights() -> str:
    averaging = callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    with pytest.raises(RuntimeError) as caught:
        trainer(CommOptModelParallel(2, 1), max_epochs=3, callbacks=[averaging]).fit(_Sharded(), loader(32))
    return str(caught.value)


@pytest.mark.exhaustive
@takes_collectives
def test_averages_of_sharded_weights_are_refused() -> None:
    """If it fails, a user of StochasticWeightAveraging looks for a mistake in the training step."""
    for explanation in run_ranks(_average_weights):
        assert "StochasticWeightAveraging cannot average sharded parameters" in explanation


def _warnings_of_sizes() -> list[list[str]]:
    shown = []
    for sizes in ((2, 1), ("auto", "auto")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(CommOptModelParallel(*sizes), max_epochs=1, limit_train_batches=1).fit(_Sharded(), loader(32))
        shown.append([str(warning.message) for warning in caught if "shard()" in str(warning.message)])
    return shown


@takes_collectives
def test_ranks_that_train_on_their_own_are_told() -> None:
    """If it fails, Lightning's default sizes leave gradients of a sharded model as they are, and nobody is told."""
    (unwarned, warned), *_ = run_ranks(_warnings_of_sizes)
    assert unwarned == []
    assert [message.partition(":")[0] for message in warned] == ["shard() averages no gradients here"]
    assert "data_parallel_size=2 and tensor_parallel_size=1" in warned[0]


def _in_both_ways(
    comm_hook: Any, num_replicas: int, replicated: bool, options: dict[str, Any]
) -> tuple[Params, Params]:
    stock = ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    ours = CommOptModelParallel(comm_hook=comm_hook)
    return _fit(stock, num_replicas, replicated, **options), _fit(ours, num_replicas, replicated, **options)


def _distance(got: Params, expected: Params) -> float:
    difference = np.concatenate([(got[name] - values).ravel() for name, values in expected.items()])
    return float(np.linalg.norm(difference) / np.linalg.norm(np.concatenate([x.ravel() for x in expected.values()])))


CASES: list[tuple[Any, int, int, bool, dict[str, Any], float]] = [
    ("int8", 2, 1, False, {}, 0.01),
    ({"name": "int8", "error_feedback": True}, 2, 1, True, {"gradient_clip_val": 0.1}, 0.01),
    ("bf16", 3, 1, False, {}, 0.005),
    ("int4", 2, 1, False, {}, 0.1),
    ("int8", 4, 2, False, {"accumulate_grad_batches": 2}, 0.01),
    ({"name": "int8", "stochastic_rounding": True}, 2, 1, False, {}, 0.02),
    ({"name": "hierarchical", "inner": "int8", "ranks_per_node": 2}, 4, 1, False, {}, 0.01),
]


@takes_collectives
@pytest.mark.parametrize(
    ("comm_hook", "world_size", "num_replicas", "replicated", "options", "bound"),
    sampled(CASES, by_default=[]),
    ids=str,
)
def test_trains_almost_the_same(
    comm_hook: Any, world_size: int, num_replicas: int, replicated: bool, options: dict[str, Any], bound: float
) -> None:
    """If it fails, gradients are divided wrongly, or lost, in a fit; or nothing is compressed."""
    both = run_ranks(_in_both_ways, comm_hook, num_replicas, replicated, options, world_size=world_size)
    for expected, got in both:
        assert 0 < _distance(got, expected) < bound
        assert_same(got, both[0][1])


def _bytes_of_both() -> dict[str, tuple[int, int, Counter[str]]]:
    return {accumulate_grads: _bytes(accumulate_grads) for accumulate_grads in ("sharded", "unsharded")}


def _bytes(accumulate_grads: Any) -> tuple[int, int, Counter[str]]:
    strategy = CommOptModelParallel(comm_hook="int8", accumulate_grads=accumulate_grads)
    model = _Sharded()
    run = trainer(strategy, max_epochs=1, accumulate_grad_batches=2)
    run.fit(model, loader(16 * dist.get_world_size()))  # 4 batches
    sizes: Counter[str] = Counter()
    for name, value in model.state_dict().items():
        rows = -(-value.shape[0] // 2)
        if value.dim() == 1:
            sizes["bytes"] += 2 * rows * 4
        else:
            sizes[name] = rows * value.shape[1]
    return strategy.wire_bytes or 0, run.global_step, sizes


@takes_collectives
def test_wire_bytes() -> None:
    """If it fails, records of runs show other bytes than travel."""
    by_mode = run_ranks(_bytes_of_both)[1]
    for (wire_bytes, steps, sizes), reductions in ((by_mode["sharded"], 4), (by_mode["unsharded"], 2)):
        assert steps == 2
        matrices = [numel for name, numel in sizes.items() if name.endswith("weight")]
        assert len(matrices) == 3
        message_bytes = sum(ShardedInt8().message_bytes(numel, 2) for numel in matrices)  # each is in a unit of its own
        assert wire_bytes == reductions * (message_bytes + sizes["bytes"]) // 2


class _Whole(Tiny):
    def configure_model(self) -> None:
        """Shards nothing."""


def _fit_whole() -> str:
    try:
        trainer(CommOptModelParallel(comm_hook="int8"), max_epochs=1).fit(_Whole(), loader(16))
    except OptionError as error:
        return str(error)
    return ""


@takes_collectives
def test_a_model_that_is_not_sharded() -> None:
    """If it fails, every rank trains on its own, or gradients are not compressed though the user asked for it."""
    for message in run_ranks(_fit_whole):
        assert "comm_hook: configure_model has not sharded the model" in message


_OPTIONS: dict[str, Any] = {"separate_reduce_scatter_group": True, "reduce_scatter_max_input_buffers": 2}


def _with_fsdps_own_options() -> tuple[Params, Params]:
    return _fit(CommOptModelParallel(comm_hook="int8")), _fit(CommOptModelParallel(comm_hook="int8", **_OPTIONS))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not all(hasattr(FSDPModule, f"set_{name}") for name in _OPTIONS), reason="not in this version of torch"
)
def test_fsdps_own_options() -> None:
    """If it fails, an option of FSDP2 changes what is trained, or breaks a compressed fit."""
    for expected, got in run_ranks(_with_fsdps_own_options):
        assert_same(got, expected)
