"""CommTimeMonitor collects in a fit of FSDP2 what predictions need, leaves comm objects alone, and recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_fit import Net, fit
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_commopt import CommOptModelParallel, shard
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.compat.fsdp import comm_objects
from lightning_commopt.compressors.sharded import ShardedInt4, ShardedInt8
from lightning_commopt.cost.fsdp2.basis import ShardedBasis, has_sharded_basis
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.forecasts import read_forecasts
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan.sharded import ShardedPlan, check_available
from support.lightnings import Callback, ModelParallelStrategy
from support.ranks import run_ranks

try:
    check_available()
except ValueError:
    pytestmark = pytest.mark.skip(reason="FSDP2 has no comm objects")

FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"plan": {"comm_hook": "int8"}, "accumulate_grad_batches": 3},
    "unsharded": {"plan": {"accumulate_grads": "unsharded"}, "accumulate_grad_batches": 2},
    "both": {
        "plan": {"comm_hook": {"name": "int4", "error_feedback": True}, "param_hook": "int8"},
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    },
    "stock": {
        "strategy": "stock",
        "replicated": True,
        "validates": True,
        "val_check_interval": 12,
        "limit_val_batches": 1,
    },
    "changing": {"callbacks": ["change"]},
    "short": {"max_steps": 3},
}


class Sharded(Net):
    def __init__(self, policy: MixedPrecisionPolicy | None = None, replicated: bool = False) -> None:
        super().__init__()
        self.policy, self.replicated = policy or MixedPrecisionPolicy(), replicated

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=torch.nn.Linear, mp_policy=self.policy, replicated=self.replicated)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.layers(batch[0])  # which leaves replicated parameters gathered


class Change(Callback):
    """Changes the plan after the calls of four batches have been timed."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 6:
            trainer.strategy.apply_plan("int8")


def train(folder: str, name: str) -> tuple[set[str], str]:
    """Returns the modules of the classes of comm objects, and what is recommended."""
    options = dict(FITS[name])
    plan, kind = options.pop("plan", {}), options.pop("strategy", "")
    strategy = ModelParallelStrategy(2, 1) if kind == "stock" else CommOptModelParallel(2, 1, **plan)
    options["callbacks"] = [Change() for _ in options.pop("callbacks", ())]
    monitor = CommTimeMonitor(every_n_steps=3, num_warmup_steps=2, dirpath=f"{folder}/{name}", print_summary=False)
    net = Sharded(options.pop("policy", None), options.pop("replicated", False))
    fit(monitor, strategy, net=net, **{"max_steps": 12, **options})
    assert monitor.verdict is not None
    modules = {type(comm).__module__ for _, comm in comm_objects(net)}
    return modules, " ".join((*monitor.verdict.recommendations, monitor.verdict.note))


def train_all(folder: str) -> list[tuple[set[str], str]]:
    return [train(folder, name) for name in FITS]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Returns the folder of the fits, and what each recommends on rank 0."""
    folder = tmp_path_factory.mktemp("fits")
    of_ranks = run_ranks(train_all, str(folder))
    for of_rank in of_ranks:
        for modules, _ in of_rank:
            assert all(module.startswith("torch.") for module in modules), "a fit leaves its observers in the model"
    return folder, {name: texts for name, (_, texts) in zip(FITS, of_ranks[0], strict=True)}


PLANS: dict[str, ShardedPlan] = {
    "plain": ShardedPlan(),
    "int8": ShardedPlan(comm_hook=ShardedInt8()),
    "unsharded": ShardedPlan(accumulate_grads="unsharded"),
    "both": ShardedPlan(comm_hook=ShardedInt4(error_feedback=True), param_hook="int8"),
    "stock": ShardedPlan(),
    "changing": ShardedPlan(comm_hook=ShardedInt8()),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_fit_leaves_what_predictions_need(fits: tuple[Path, dict[str, str]], name: str) -> None:
    """If it fails, a run cannot be asked about other plans, or is taken for another one."""
    folder = fits[0] / name
    assert has_sharded_basis(folder)
    basis = ShardedBasis.load(folder / PREDICTION_FILE)
    work, parameter_bytes = basis.workload, 2 if name == "both" else 4
    assert basis.plan == PLANS[name]
    assert [unit[1:] for unit in work.units if unit.name] == [
        ((8 * 16, 16, 4), (8 * 16, 16, parameter_bytes)),
        ((16 * 4, 4, 4), (16 * 4, 4, parameter_bytes)),
    ]
    first, second = (place for place, unit in enumerate(work.units) if unit.name)
    assert work.forward == (first, second)
    assert [call[:2] for call in work.backward if call.operation == "reduce_scatter"] == [
        ("reduce_scatter", second),
        ("reduce_scatter", first),
    ]
    assert all(call.after_s > 0 for call in work.backward)
    assert (work.num_ranks, work.num_batches) == (2, FITS[name].get("accumulate_grad_batches", 1))
    steps = read_run(folder)[0].steps
    assert min(one.totals.step_s for one in steps) <= work.step_s <= max(one.totals.step_s for one in steps)
    assert basis.predict(basis.plan).step_s == pytest.approx(work.step_s)


def test_a_fit_recommends_what_it_predicts(fits: tuple[Path, dict[str, str]]) -> None:
    """If it fails, the summary of a run and its predictions disagree, or name options of another strategy."""
    folder, texts = fits
    assert all("are for the median of" in texts[name] for name in PLANS)
    settings = {name: {forecast.setting for forecast in read_forecasts(folder / name)} for name in PLANS}
    assert {'comm_hook="bf16"', 'comm_hook="int4"', 'param_hook="int8"'} < settings["plain"]
    assert 'accumulate_grads="unsharded"' in settings["int8"]
    assert 'comm_hook="none"' in settings["int8"]
    assert not any("accumulate" in setting for setting in settings["unsharded"] | settings["plain"])
    assert 'CommOptModelParallel(comm_hook="int8")' in settings["stock"]
    assert 'param_hook="int8"' not in settings["both"]


def test_a_short_fit_predicts_nothing(fits: tuple[Path, dict[str, str]]) -> None:
    """If it fails, a prediction is made of two batches."""
    assert not (fits[0] / "short" / PREDICTION_FILE).exists()
    assert "are for the median of" not in fits[1]["short"]
