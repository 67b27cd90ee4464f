"""Trains somebody else's module on every rank, with Lightning's DDPStrategy and with plans that lose nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from lightning_commopt import CommOptDDP
from support.ranks import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "native": {},
    "view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    "all_reduce": {"comm_hook": "all_reduce"},
    "all_reduce_small_buckets": {"comm_hook": "all_reduce", "bucket_cap_mb": 0.05},
    "static_all_reduce": {"comm_hook": "all_reduce", "bucket_cap_mb": 0.05, "static_graph": True},
}
# A static graph's first backward is synchronized even where it accumulates, which rounds its gradients once more.
EXACT_IN_ACCUMULATION = tuple(name for name, plan in PLANS.items() if "static_graph" not in plan)


@dataclass(frozen=True)
class Trained:
    """What a fit leaves: the loss of each batch on this rank, and all parameters."""

    losses: list[float]
    parameters: dict[str, np.ndarray]
    wire_bytes: int | None = None


class _Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def fit(
    make: Callable[[], tuple[LightningModule, Any]],
    strategy: DDPStrategy,
    callbacks: Callable[[], list[Callback]] = list,
    **options: Any,
) -> Trained:
    """Trains for a few steps on CPU; everything that is random begins with the same seed.

    Args:
        make: returns a new module, and its dataloader.
        strategy: of Lightning or of ours.
        callbacks: returns new ones.
        options: of the Trainer.
    """
    seed_everything(7, verbose=False)
    module, batches = make()
    losses = _Losses()
    trainer = quiet_trainer(strategy, callbacks=[losses, *callbacks()], **{"max_steps": 6, **options})
    trainer.fit(module, batches)
    return Trained(losses.values, numbers(module.state_dict()), getattr(strategy, "wire_bytes", None))


def quiet_trainer(strategy: DDPStrategy, **options: Any) -> Trainer:
    """Returns a trainer on CPU for every rank of the group, which writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings = {"accelerator": "cpu", "devices": dist.get_world_size(), "num_sanity_val_steps": 0}
    return Trainer(strategy=strategy, **{**quiet, **settings, **options})


def numbers(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a state as arrays, exactly."""
    return {name: value.detach().double().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}


def _fit_all(
    make: Callable[[], tuple[LightningModule, Any]],
    plans: tuple[str, ...],
    ddp: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Trained]:
    trained = {"lightning": fit(make, DDPStrategy(**ddp), **options)}
    for name in plans:
        trained[name] = fit(make, CommOptDDP(**{**ddp, **PLANS[name]}), **options)
    return trained


def assert_trains_as_lightnings_ddp(
    make: Callable[[], tuple[LightningModule, Any]],
    *,
    ddp: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Checks losses and parameters of every plan on two ranks, bit for bit.

    Args:
        make: see `fit`; at module level.
        ddp: what Lightning's strategy and ours are both given.
        options: of the Trainer.
    """
    plans = EXACT_IN_ACCUMULATION if options.get("accumulate_grad_batches", 1) > 1 else tuple(PLANS)
    of_ranks = run_ranks(_fit_all, make, plans, dict(ddp or {}), options, limit_s=500)
    for rank, trained in enumerate(of_ranks):
        for name in plans:
            assert_same(trained[name], trained["lightning"], f"{name}, rank {rank}")
            assert_same_parameters(trained[name], of_ranks[0][name], f"{name}, ranks 0 and {rank}")


def assert_same(got: Trained, expected: Trained, name: str) -> None:
    """Compares two fits bit for bit; one in which nothing was learnt proves nothing."""
    assert len(set(expected.losses)) > 1, f"{name}: the loss never changed"
    assert got.losses == expected.losses, name
    assert_same_parameters(got, expected, name)


def assert_same_parameters(got: Trained, expected: Trained, name: str) -> None:
    """Compares parameters and buffers bit for bit."""
    assert got.parameters.keys() == expected.parameters.keys(), name
    for key, values in expected.parameters.items():
        np.testing.assert_array_equal(got.parameters[key], values, err_msg=f"{name}: {key}")
