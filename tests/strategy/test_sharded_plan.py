"""`CommOptModelParallel` in the common house: its plan, changes of it, uneven batches, and ranks that fail."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_commopt import (
    CommOptModelParallel,
    CommPlan,
    OptionError,
    ShardedCompressor,
    ShardedPlan,
    shard,
)
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges, RunRecorder, SpeedMonitor
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt8
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import nested
from support.collectives import takes_collectives
from support.lightnings import Callback
from support.ranks import run_ranks_or_raise
from support.sharded_model import Sharded
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.vanishing import Vanishing, check_that_both_end, prepare_rank
from support.warm_ranks import run_ranks

pytestmark = takes_collectives
_LIMIT_S = 60
_FEEDBACK = {"name": "int4", "error_feedback": True}


@pytest.mark.parametrize(
    ("plan", "hook"),
    [
        (ShardedPlan(accumulate_grads="unsharded"), None),
        (CommPlan(comm_hook="bf16"), ShardedBf16()),  # type: ignore[arg-type]
        (CommPlan.from_dict({"comm_hook": {"name": "int8", "block_size": 64}}), ShardedInt8(block_size=64)),
        (CommPlan(), None),
    ],
    ids=str,
)
def test_plans_of_both_kinds_are_taken(plan: Any, hook: ShardedCompressor | None, tmp_path: Path) -> None:
    """If it fails, a plan that a sweep over DDP has found cannot be tried with FSDP2."""
    strategy = CommOptModelParallel(plan=plan)
    assert strategy.plan.comm_hook == hook
    strategy.plan.save(tmp_path / "plan.json")
    assert CommOptModelParallel.from_plan(tmp_path / "plan.json").plan == strategy.plan
    plan.save(tmp_path / "given.json")
    assert CommOptModelParallel(plan=tmp_path / "given.json").plan.comm_hook == hook


class _Changing(Callback):
    """Applies plans before the batches with these numbers; keeps the bytes that were handed over in each batch."""

    def __init__(self, plans: dict[int, Any]) -> None:
        self.plans = plans
        self.bytes: list[int | None] = []
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.bytes.append(trainer.strategy.wire_bytes)
        self.names.append(trainer.strategy.plan.name)
        if trainer.global_step in self.plans:
            trainer.strategy.apply_plan(self.plans[trainer.global_step])


def _fit(plans: dict[int, Any], **options: Any) -> tuple[Params, list[Any], list[str]]:
    model, changing = Sharded(), _Changing(plans)
    strategy = CommOptModelParallel(data_parallel_size=2, tensor_parallel_size=1, **options)
    run = trainer(strategy, max_epochs=1, callbacks=[changing])
    with torch.random.fork_rng():
        run.fit(model, loader(32 * dist.get_world_size()))
    assert run.global_step > max(plans, default=0) + 1
    params = {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}
    return params, changing.bytes, changing.names


def _fits() -> dict[str, Any]:
    plain = _fit({})
    int8 = _fit({}, comm_hook="int8")
    return {
        "plain": plain,
        "unchanged": _fit({1: "none", 2: CommPlan()}),
        "unsharded": _fit({1: ShardedPlan(accumulate_grads="unsharded")}),
        "int8": int8,
        "int8 again": _fit({2: "int8"}, comm_hook="int8"),
        "to int8": _fit({2: "int8"}),
        "from int8": _fit({2: "none"}, comm_hook="int8"),
        "parameters": _fit({2: ShardedPlan(param_hook="int8"), 4: "none"}),
    }


def test_plans_change_in_a_fit() -> None:
    """If it fails, a change of plan loses gradients, or does not happen."""
    for fits in run_ranks(_fits, limit_s=_LIMIT_S):
        plain, _, names = fits["plain"]
        assert {*names} == {"uncompressed"}
        for name in ("unchanged", "unsharded"):
            assert_same(fits[name][0], plain)
        assert_same(fits["int8 again"][0], fits["int8"][0])
        for name in ("to int8", "from int8", "parameters"):
            difference = max(np.abs(value - plain[key]).max() for key, value in fits[name][0].items())
            assert 0 < difference < 0.05, name
        _, sent, names = fits["to int8"]
        assert names[:3] == ["uncompressed", "uncompressed", "int8"]
        assert sent[:2] == [None, None]
        assert sent[2] > 0
        _, sent, names = fits["from int8"]
        assert names[1:3] == ["int8", "uncompressed"]
        assert sent[1] == 2 * sent[0] == sent[-1]  # FSDP2's own are not counted


class _Fed(Tiny):
    """Its gradients are given, and its parameters are minus the sum of all averages."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(64, 48, bias=False)
        nn.init.zeros_(layer.weight)
        self.layers = nn.Sequential(layer)

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, weights = _gradients(dist.get_rank(), self.trainer.global_step)
        return (self(inputs) * weights).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _gradients(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 64, generator=generator), torch.randn(4, 48, generator=generator)


class _Owing(_Changing):
    """Keeps what ranks owe on average when the plan changes."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in self.plans:
            (residual,) = trainer.strategy.sharded_sync.residuals().values()
            dist.all_reduce(residual)
            self.owed = float(residual.norm() / dist.get_world_size())
        super().on_train_batch_end(trainer, *args)


def _feed(plan: Any, **options: Any) -> tuple[float, float, str]:
    model, owing = _Fed(), _Owing({3: plan})
    run = trainer(CommOptModelParallel(comm_hook=_FEEDBACK), max_epochs=1, max_steps=5, callbacks=[owing], **options)
    run.fit(model, DataLoader(TensorDataset(torch.zeros(16, 1))))
    fed = torch.zeros(48, 64)
    for step in range(5):
        for rank in range(dist.get_world_size()):
            inputs, weights = _gradients(rank, step)
            fed += weights.T @ inputs / dist.get_world_size()
    (weight,) = (value.full_tensor() for value in model.state_dict().values())
    return owing.owed, float((weight + fed).norm()), owing.names[-1]


def _feeds() -> list[tuple[float, float, str]]:
    return [_feed("none"), _feed("bf16"), _feed({"name": "int8", "error_feedback": True})]


def test_what_is_owed_outlives_a_change() -> None:
    """If it fails, gradients that error feedback has held back are lost when the plan changes."""
    for none, bf16, int8 in run_ranks(_feeds, limit_s=_LIMIT_S):
        assert [none[2], bf16[2], int8[2]] == ["uncompressed", "bf16", "int8 error feedback"]
        for owed, error, _ in (none, bf16, int8):
            assert owed > 5
            assert error < 0.1 * owed  # about 1 % of a residual is lost to its own rounding, in every step


def _apply_different_plans() -> str:
    class Differing(Callback):
        message = ""

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            with pytest.raises(OptionError) as caught:
                trainer.strategy.apply_plan(["bf16", "int8"][trainer.global_rank])
            self.message = str(caught.value)

    differing = Differing()
    strategy = CommOptModelParallel(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(strategy, max_epochs=1, callbacks=[differing])
    run.fit(Sharded(), loader(32))
    assert run.strategy.plan == ShardedPlan()  # type: ignore[attr-defined]
    return differing.message


def test_different_plans_are_an_error() -> None:
    """If it fails, ranks wait for each other's messages."""
    for message in run_ranks(_apply_different_plans, limit_s=_LIMIT_S):
        assert message.startswith("apply_plan must get the same plan on all ranks, got comm_hook=ShardedBf16() on rank")


def _apply_impossible_plan() -> tuple[str, Params, Params]:
    class Failing(Callback):
        message = ""

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            if not self.message:
                plan = {"name": "hierarchical", "inner": "bf16", "ranks_per_node": 3}
                with pytest.raises(OptionError) as caught:
                    trainer.strategy.apply_plan(plan)
                self.message = str(caught.value)

    trained = []
    for callbacks in ([failing := Failing()], []):
        model = Sharded()
        with torch.random.fork_rng():
            trainer(CommOptModelParallel(comm_hook=_FEEDBACK), max_epochs=2, callbacks=callbacks).fit(model, loader(32))
        trained.append({name: value.full_tensor().numpy() for name, value in model.state_dict().items()})
    return failing.message, trained[0], trained[1]


def test_after_a_plan_that_is_impossible_the_old_one_goes_on() -> None:
    """If it fails, a residual or the old plan is lost to a plan that was refused."""
    for message, after, undisturbed in run_ranks(_apply_impossible_plan, limit_s=_LIMIT_S):
        assert message == "comm_hook: ranks_per_node must divide the number of shards, 2, got 3"
        assert_same(after, undisturbed)


def _record(folder: Path) -> None:
    recorders = [
        *(RunRecorder(dirpath=folder), CommTimeMonitor(dirpath=folder, num_warmup_steps=1)),
        *(SpeedMonitor(num_warmup_steps=1), HangMonitor(dirpath=folder / "hangs"), NVTXRanges()),
    ]
    strategy = CommOptModelParallel(comm_hook="int8", param_hook="int8")
    trainer(strategy, max_epochs=1, callbacks=recorders).fit(Sharded(), loader(32))


def test_a_run_has_its_plan(tmp_path: Path) -> None:
    """If it fails, a report cannot tell runs of FSDP2 apart."""
    run_ranks(_record, tmp_path, limit_s=_LIMIT_S)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["sync_method"], record["plan_name"], record["is_lossy"]) == ("int8", "int8, int8 parameters", True)
    options = {"name": "int8", "block_size": 128, "error_feedback": False, "stochastic_rounding": False}
    known = nested(RunRecord.load(tmp_path).settings.plan_options)
    assert known == {"comm_hook": options, "param_hook": "int8"}
    assert record["plan_type"] == "ShardedPlan"


def _uneven(policy: str) -> int:
    num_batches = (3, 5)[dist.get_rank()]
    rows = DataLoader(Subset(loader(64).dataset, range(num_batches)))
    strategy = CommOptModelParallel(uneven_batches=policy)  # type: ignore[arg-type]
    run = trainer(strategy, max_epochs=2, use_distributed_sampler=False, limit_val_batches=0)
    run.fit(Sharded(), rows)
    return int(run.global_step)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Ranks have different numbers of training batches")
def test_uneven_batches() -> None:
    """If it fails, ranks of FSDP2 wait for each other's all-gathers until the timeout."""
    for _, trace in run_ranks_or_raise(_uneven, "error", world_size=2, limit_s=_LIMIT_S):
        assert "UnevenBatchesError: Ranks have different numbers of training batches" in str(trace)
    assert run_ranks(_uneven, "drop", limit_s=_LIMIT_S) == [6, 6]
    assert run_ranks(_uneven, "pad", limit_s=_LIMIT_S) == [10, 10]


class _VanishingShards(Vanishing, Sharded):
    pass


def _vanish(folder: Path) -> None:
    prepare_rank(folder)
    trainer(CommOptModelParallel()).fit(_VanishingShards(), loader(32))


def test_rank_that_waits_for_a_dead_one_ends(tmp_path: Path) -> None:
    """If it fails, ranks hang until somebody looks."""
    check_that_both_end(_vanish, tmp_path, _LIMIT_S)
