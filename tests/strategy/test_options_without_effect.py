"""Options that change nothing in a fit warn once, on rank 0; others never do."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.strategy.adapters import adapter_for
from lightning_commopt.text import validation
from support.collectives import takes_collectives
from support.lightnings import PACKAGE
from support.sharded_model import Sharded
from support.strategy_models import FEATURES, Tiny, loader, trainer
from support.warm_ranks import run_ranks


class _Scaled(Tiny):
    """Has parameters of one dimension only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LayerNorm(FEATURES)  # type: ignore[assignment]

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=nn.LayerNorm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]).sum(1, keepdim=True), batch[1])


class _Unsharded(Tiny):
    """Has no unit of FSDP2."""

    def configure_model(self) -> None:
        pass


class _WithBuffers(Tiny):
    """Has a layer that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(1))


def _warnings_of(strategy: Callable[[], Any], model: Tiny, accumulate: int = 1) -> list[str]:
    validation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
        warnings.simplefilter("always")
        trainer(strategy(), max_epochs=1, accumulate_grad_batches=accumulate).fit(model, loader(24))
    return [str(warning.message) for warning in caught if "effect" in str(warning.message)]


def _fits() -> list[list[str]]:
    warned = []
    for options, model, accumulate in (
        ({"accumulate_grads": "unsharded"}, Sharded(), 1),
        ({"accumulate_grads": "unsharded"}, Sharded(), 3),
        ({"comm_hook": "int8"}, _Scaled(), 1),
        ({"comm_hook": "int8"}, Sharded(), 1),
        ({"comm_hook": {"name": "hierarchical", "inner": "int8", "ranks_per_node": 1}}, Sharded(), 1),
    ):
        warned.append(_warnings_of(partial(CommOptModelParallel, 2, 1, **options), model, accumulate))
    return warned


@takes_collectives
def test_options_of_fsdp2() -> None:
    """If it fails, somebody trains on with an option that does nothing, or is warned where it does something."""
    first, second = run_ranks(_fits)
    assert second == [[]] * 5
    assert first == [
        ["accumulate_grads='unsharded' had no effect: no gradients were accumulated."],
        [],
        [
            "comm_hook has no effect here: each unit of the model has only parameters that are sent uncompressed:"
            " complex ones, and those of one dimension."
        ],
        [],
        ["comm_hook: 'hierarchical' has no effect here: each node has one rank, so its 'inner' does everything."],
    ]


def _fit_without_units() -> list[str]:
    return _warnings_of(partial(CommOptModelParallel, 2, 1, separate_reduce_scatter_group=True), _Unsharded())


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="FSDP2 of this torch has no such option"
)
def test_options_of_units() -> None:
    """If it fails, somebody who forgot to shard the model learns nothing from options that concern its units."""
    message = "separate_reduce_scatter_group has no effect: the model has no unit of FSDP2."
    assert run_ranks(_fit_without_units) == [[message], []]


def _buffers() -> list[list[str]]:
    warned = [_warnings_of(partial(CommOptDDP, broadcast_buffers=False), model) for model in (Tiny(), _WithBuffers())]
    for model in (nn.Linear(2, 2), nn.BatchNorm1d(2)):
        validation.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricCommOptDDP(broadcast_buffers=False))
            fabric.launch()
            fabric.setup_module(model)
        warned.append([str(warning.message) for warning in caught if "effect" in str(warning.message)])
    return warned


def test_options_for_buffers() -> None:
    """If it fails, somebody sweeps over what is the same for this model, or is warned where it is not."""
    first, second = run_ranks(_buffers)
    assert second == [[]] * 4
    assert first == [["broadcast_buffers=False has no effect: the model has no buffers."], []] * 2


def _logged_on_one_rank() -> list[str]:
    logged: list[str] = []
    rank_zero.log.addFilter(lambda record: logged.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    trainer(CommOptDDP(sigterm_every_n_steps=3), max_epochs=1).fit(Tiny(), loader(24))
    return logged


def test_sigterm_on_one_rank() -> None:
    """If it fails, nobody learns that one process agrees with nobody."""
    (logged,) = run_ranks(_logged_on_one_rank, world_size=1)
    assert "sigterm_every_n_steps=3 has no effect: there is only one process." in logged


@pytest.mark.skipif("skip_all_reduce_unused_params" not in ddp_options(), reason="DDP has it from torch 2.8 on")
@pytest.mark.parametrize("other", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_a_search_that_nobody_makes(other: dict[str, Any]) -> None:
    """If it fails, gradients that no rank used are sent although their option is on, and nobody knows."""
    validation.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CommOptDDP(skip_all_reduce_unused_params=True, **other)
    effects = [str(warning.message) for warning in caught if "has no effect" in str(warning.message)]
    needed = "skip_all_reduce_unused_params=True has no effect: it needs find_unused_parameters=True."
    assert effects == ([] if other else [needed])


class _WrapsItself(adapter_for(PACKAGE)):  # type: ignore[misc]  # it must be of the Trainer's package
    """Somebody's own strategy, which forgets Lightning's `_register_ddp_hooks`."""

    def configure_ddp(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(self.lightning_module)


class _WrapsParts(adapter_for(PACKAGE)):  # type: ignore[misc]
    """Somebody's own strategy for a GAN, which wraps the networks one by one."""

    def configure_ddp(self) -> None:
        self.model.layers = nn.parallel.DistributedDataParallel(self.model.layers)


def _warnings_of_own_wrapper(strategy: Callable[..., Any]) -> list[str]:
    return _warnings_of(partial(strategy, comm_hook="int8"), Tiny())


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (_WrapsItself, "_WrapsItself wraps the model itself. Call self._register_ddp_hooks()"),
        (_WrapsParts, "the configure_ddp of _WrapsParts does not wrap the LightningModule"),
    ],
)
def test_a_strategy_that_registers_no_hook(strategy: Callable[..., Any], why: str) -> None:
    """If it fails, a subclass that wraps the model by itself trains uncompressed without a word."""
    first, second = run_ranks(_warnings_of_own_wrapper, strategy)
    assert len(first) == 1
    assert f"comm_hook has no effect: {why}" in first[0]
    assert not second
