"""Compiled modules: where torch cuts their graphs at buckets, what a comm hook gets, and what training ends in."""

import inspect
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lossless_fits import Trained, assert_same, assert_same_parameters, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP
from lightning_commopt.compressors import AllReduce
from lightning_commopt.plan import CommPlan, OptionError
from support.ranks import run_ranks

pytestmark = pytest.mark.exhaustive

_WIDTH, _NUM_LAYERS = 512, 8  # 1 MiB of weights in each layer


class _Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class _GraphSizes:
    """A backend that runs graphs as they are, and keeps the MiB of parameters of each, in the order of backward."""

    def __init__(self) -> None:
        self.mib: list[float] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        parameters = [value for value in inputs if isinstance(value, nn.Parameter)]
        self.mib.insert(0, sum(parameter.numel() * 4 / 2**20 for parameter in parameters))
        return graph.forward


class _ChangePlan(Callback):
    def __init__(self, plan: CommPlan, *, resets_compiler: bool) -> None:
        self.plan = plan
        self.resets_compiler = resets_compiler

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.strategy.apply_plan(self.plan)  # type: ignore[attr-defined]
            if self.resets_compiler:
                torch.compiler.reset()


def _fit_compiled(strategy: DDPStrategy, backend: Any = "inductor", **options: Any) -> Trained:
    torch.compiler.reset()

    def make() -> tuple[Any, Any]:
        x = torch.randn(32, _WIDTH, generator=torch.Generator().manual_seed(1))
        return torch.compile(_Wide(), backend=backend), DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=4)

    return fit(make, strategy, **{"max_steps": 3, **options})


def _graphs(options: dict[str, Any]) -> tuple[list[float], int | None]:
    sizes = _GraphSizes()
    return sizes.mib, _fit_compiled(CommOptDDP(**options), sizes).wire_bytes


_CUTS: list[tuple[dict[str, Any], list[float]]] = [
    ({"bucket_cap_mb": 2, "comm_hook": "bf16"}, [1, 2, 2, 2, 1]),
    ({"bucket_cap_mb": 100, "static_graph": True}, [1, 7]),
]
if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
    _CUTS.append(({"bucket_cap_mb": [1, 3, 4]}, [1, 4, 3]))


@pytest.mark.parametrize(("options", "mib"), _CUTS, ids=str)
def test_graphs_are_cut_after_one_mib_and_then_at_the_bucket_size(options: dict[str, Any], mib: list[float]) -> None:
    """If it fails, docs/how_to/ddp.md is wrong about torch.compile, or the hook misses gradients of compiled graphs."""
    sizes, wire_bytes = run_ranks(_graphs, options)[0]
    assert sizes == mib
    assert wire_bytes == 3 * _NUM_LAYERS * 2**20 // (2 if "comm_hook" in options else 1)


def _graphs_of_two_plans(resets_compiler: bool) -> list[float]:
    sizes = _GraphSizes()
    change = _ChangePlan(CommPlan(bucket_cap_mb=4, comm_hook=AllReduce()), resets_compiler=resets_compiler)
    changed = _fit_compiled(CommOptDDP(bucket_cap_mb=2), sizes, callbacks=lambda: [change])
    assert_same_parameters(changed, _fit_compiled(CommOptDDP(bucket_cap_mb=2), "eager"), "apply_plan")
    return sizes.mib


@pytest.mark.parametrize(("resets_compiler", "later"), [(False, []), (True, [1, 4, 3])])
def test_apply_plan_leaves_graphs_as_they_are_cut(resets_compiler: bool, later: list[float]) -> None:
    """If it fails, a new plan compiles the model again without need, or trains another one."""
    assert run_ranks(_graphs_of_two_plans, resets_compiler)[0] == [*later, 1, 2, 2, 2, 1]


def _train_both(options: dict[str, Any]) -> list[tuple[str, Trained, Trained]]:
    of_lightning = _fit_compiled(DDPStrategy(**options))
    plans: dict[str, dict[str, Any]] = {
        "native": {},
        "view_static": {"comm_hook": "all_reduce", "static_graph": True, "gradient_as_bucket_view": True},
    }
    return [(name, _fit_compiled(CommOptDDP(**options, **plan)), of_lightning) for name, plan in plans.items()]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a compiler")
def test_trains_as_with_lightnings_ddp() -> None:
    """If it fails, what inductor makes does not go with a plan that loses nothing."""
    for of_rank in run_ranks(_train_both, {"bucket_cap_mb": 2}, limit_s=500):
        for name, ours, of_lightning in of_rank:
            assert_same(ours, of_lightning, name)


def _fail_below_one_mib() -> str:
    try:
        _fit_compiled(CommOptDDP(bucket_cap_mb=0.5), "eager")
    except AssertionError as error:
        return str(error)
    return ""


def test_buckets_below_one_mib_are_refused_with_what_to_do() -> None:
    """If it fails, a user reads that the first bucket should be smaller to get communication warmed up, and no more."""
    for message in run_ranks(_fail_below_one_mib):
        assert "bucket_cap_mb: use at least 1" in message
        assert "optimize_ddp" in message


def _use_python_reducer(comm_hook: str | None) -> str | None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        try:
            _fit_compiled(CommOptDDP(comm_hook=comm_hook), "eager")
        except OptionError as error:
            return str(error)
    return None


def test_python_reducer_takes_no_comm_hook() -> None:
    """If it fails, torch hands a hook one gradient at a time, and the hook fails at its first attribute."""
    for message in run_ranks(_use_python_reducer, "bf16"):
        assert message is not None
        assert "python_reducer" in message
