"""Fits of sharded models with plan="auto": what is chosen among compressors, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_commopt import CommOptModelParallel, OptionError, shard
from lightning_commopt.callbacks import RunRecorder
from lightning_commopt.plan import sharded
from lightning_commopt.plan.sharded import ShardedPlan
from support.scripted_tuning import scripted
from support.strategy_models import Params, Tiny, assert_same, loader, trainer
from support.warm_ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 takes other collectives from torch 2.9 on"
)


class _Sharded(Tiny):
    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=150)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _fit(strategy: CommOptModelParallel, *callbacks: Any) -> Params:
    model = _Sharded()
    with torch.random.fork_rng():
        trainer(strategy, max_epochs=20, callbacks=list(callbacks)).fit(model, loader(16 * dist.get_world_size()))
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


def _choose(times: dict[str, float], folder: str, choices: str) -> tuple[Params, str, dict[str, Any], set[str]]:
    plans = {ShardedPlan.from_dict({"comm_hook": hook}): share for hook, share in times.items()}
    with scripted(plans, folder=choices) as steps:
        strategy = CommOptModelParallel(plan="auto", lossy=["int8", "bf16"])
        trained = _fit(strategy, RunRecorder(dirpath=folder))
    return trained, strategy.plan.name, strategy.auto_plan.describe(), {plan.name for plan in steps}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"int8": 0.6, "bf16": 0.9}, "int8"),
        pytest.param({"int8": 1.3, "bf16": 0.7}, "bf16", marks=pytest.mark.exhaustive),
        pytest.param({"int8": 1.3, "bf16": 1.1}, "uncompressed", marks=pytest.mark.exhaustive),
    ],
    ids=["int8", "bf16", "none"],
)
def test_the_fastest_is_chosen(times: dict[str, float], chosen: str, tmp_path: Path) -> None:
    """If it fails, a search ends on a slower compressor, or ranks train with different ones."""
    first, second = run_ranks(_choose, times, str(tmp_path), str(tmp_path / "choices"))
    assert_same(first[0], second[0])
    assert first[1] == second[1] == chosen
    assert first[3] == {"uncompressed", "int8", "bf16"}
    found, record = first[2], json.loads((tmp_path / "run.json").read_text())
    assert second[2] == {}
    assert found["chosen"] == chosen
    assert [candidate["predicted_s"] for candidate in found["candidates"]] == [None] * 3
    assert (record["sync_method"], record["plan_name"]) == ("auto", f"auto: {chosen}")
    assert record["tuning"]["chosen"] == chosen
    assert record["is_lossy"] == (chosen != "uncompressed")


def _choose_twice(choices: str) -> list[dict[str, Any]]:
    return [_choose({"int8": 0.6, "bf16": 0.9}, choices, choices)[2] for _ in range(2)]


@pytest.mark.exhaustive
def test_what_an_earlier_fit_has_chosen_is_tried_first(tmp_path: Path) -> None:
    """If it fails, every fit searches as if there had been none before."""
    (first, second), _ = run_ranks(_choose_twice, str(tmp_path))
    assert first["num_search_steps"] > second["num_search_steps"] > 0
    assert second["chosen"] == "int8"
    assert [candidate["plan"] for candidate in second["candidates"]] == ["uncompressed", "int8"]


def _choose_again_after_a_change() -> tuple[str, dict[str, Any]]:
    int8, bf16 = (ShardedPlan.from_dict({"comm_hook": hook}) for hook in ("int8", "bf16"))
    strategy = CommOptModelParallel(plan="auto", lossy=["bf16", "int8"])
    with scripted({int8: 0.6, bf16: 0.9}, change=(500, {int8: 2.0, bf16: 1.2})):
        job = trainer(strategy, max_epochs=20)
        job.fit(_Sharded(), loader(16 * dist.get_world_size()))
        job.fit_loop.max_epochs = 240
        job.fit(_Sharded(), loader(16 * dist.get_world_size()))
    return strategy.plan.name, strategy.auto_plan.describe()


@pytest.mark.exhaustive
def test_what_an_earlier_fit_has_chosen_is_compared_with_the_others_after_a_change() -> None:
    """If it fails, a second fit with the same strategy knows one compressor only."""
    (chosen, found), (others, _) = run_ranks(_choose_again_after_a_change)
    assert chosen == others == "bf16"
    assert [what for _, what in found["events"]] == ["drift"]
    assert [candidate["plan"] for candidate in found["candidates"]] == ["uncompressed", "int8", "bf16"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "auto"}, "plan='auto' has nothing to choose: for sharded models.*lossy=\\['bf16', 'int8'\\]"),
        ({"lossy": ["int8"]}, "lossy=\\['int8'\\] lists what plan='auto' may choose"),
        ({"plan": "auto", "lossy": ["powersgd"]}, "'never' or compressors: 'powersgd' averages whole gradients"),
        ({"plan": "auto", "lossy": 8}, "lossy must be 'never', a compressor, or a list of compressors"),
        ({"plan": "auto", "lossy": ["int8"], "comm_hook": "bf16"}, "nothing to choose with comm_hook='bf16'"),
        ({"plan": "auto", "lossy": ["int8"], "uneven_batches": "allow"}, "exclude each other"),
    ],
    ids=str,
)
def test_values(options: dict[str, Any], message: str) -> None:
    """If it fails, a search that can choose nothing is begun, or an option is ignored."""
    with pytest.raises(OptionError, match=message):
        CommOptModelParallel(**options)


def test_a_torch_whose_fsdp2_takes_no_compressor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, torch 2.8 is found to be too old only when the fit has started on all ranks."""
    monkeypatch.setattr(sharded, "FSDPModule", object)
    with pytest.raises(OptionError, match=r"^plan='auto' of CommOptModelParallel needs torch >= 2\.9"):
        CommOptModelParallel(plan="auto", lossy=["int8"])


class _Whole(Tiny):
    def configure_model(self) -> None:
        """Shards nothing."""


class _TensorParallel(Tiny):
    def configure_model(self) -> None:
        """Divides the rows of a weight among the ranks, as data parallelism would."""
        mesh = self.device_mesh
        assert mesh is not None
        parallelize_module(self.layers[0], mesh["tensor_parallel"], ColwiseParallel(use_local_output=False))
        fully_shard(self, mesh=mesh["data_parallel"])


class _Divided(Tiny):
    def configure_model(self) -> None:
        """Divides the sum of gradients by a number of its own."""
        fully_shard(self, mesh=None if self.device_mesh is None else self.device_mesh["data_parallel"])
        self.set_gradient_divide_factor(4.0)  # type: ignore[operator]  # a method of FSDPModule


def _fit_in_vain(model: Tiny, **sizes: Any) -> str:
    strategy = CommOptModelParallel(plan="auto", lossy=["int8"], **sizes)
    with pytest.raises(OptionError) as caught:
        trainer(strategy, max_epochs=1).fit(model, loader(16))
    return str(caught.value)


def _fit_all_in_vain() -> tuple[str, str, str]:
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    return _fit_in_vain(_Whole()), _fit_in_vain(_Divided()), _fit_in_vain(_TensorParallel(), **sizes)


def test_a_model_whose_gradients_cannot_be_compressed_is_an_error_at_the_start() -> None:
    """If it fails, a fit ends in the middle, when the search tries its first compressor."""
    for whole, divided, tensor_parallel in run_ranks(_fit_all_in_vain):
        assert whole.startswith("plan='auto': configure_model has not sharded the model")
        assert divided == "plan='auto': comm_hook and set_gradient_divide_factor exclude each other"
        assert tensor_parallel.startswith("plan='auto': comm_hook and param_hook support data parallelism only")
