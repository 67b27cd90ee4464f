"""Describes a run before it trains: strategy, plan, device, model; for its record and its files of steps."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_commopt.compat.lightning import comm_hook_of
from lightning_commopt.compressors.channel import backends_of
from lightning_commopt.compressors.configs import compressor_to_config
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.launch.nccl_variables import PREFIX, nccl_variables
from lightning_commopt.measure.runs.settings import Settings, flat
from lightning_commopt.plan import CommPlan, DiLoCoPlan, Plan
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.strategy.base import is_baseline, plan_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

_LOSSLESS_HOOK_OF_TORCH = "allreduce_hook"


def describe_run(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Returns the fields of the run's record that are known before the fit."""
    fields = {
        **_describe_ranks(trainer),
        "sync_method": type(trainer.strategy).__name__,
        "num_parameters": num_parameters(module),
    }
    plan = plan_of(trainer.strategy)
    if plan is not None:
        fields["sync_method"] = plan.sync_method
        fields["plan_name"] = plan.name
        fields["is_lossy"] = plan.is_lossy
        auto_plan = getattr(trainer.strategy, "auto_plan", None)
        if auto_plan is not None and auto_plan.is_wanted:
            fields["sync_method"] = "auto"
    elif getattr(trainer.strategy, "is_lossy", False):
        fields["is_lossy"] = True
    return fields


def num_parameters(module: LightningModule) -> int | None:
    """Returns the number of elements of all parameters; None before ``configure_model`` or a forward creates them."""
    parameters = list(module.parameters())
    return None if any(map(is_lazy, parameters)) else sum(parameter.numel() for parameter in parameters) or None


def describe_rank(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Returns the header of a rank's file of steps, with name, shape and itemsize of each trained parameter.

    Lazy parameters are not included. DDP refuses them, so gradient sync has none.
    """
    trained = ((name, x) for name, x in module.named_parameters() if x.requires_grad and not is_lazy(x))
    return {
        "rank": trainer.global_rank,
        **_describe_ranks(trainer),
        "backend": dist.get_backend() if dist.is_available() and dist.is_initialized() else None,
        **describe_plan(trainer.strategy),
        "parameters": [(name, tuple(parameter.shape), parameter.element_size()) for name, parameter in trained],
    }


def describe_hook(strategy: Strategy) -> dict[str, Any]:
    """Returns ``comm_hook``, the name of the hook or strategy that averages gradients, and ``is_lossy``."""
    plan = plan_of(strategy)
    compressor = None if plan is None else plan.comm_hook
    if isinstance(plan, DiLoCoPlan):
        name, is_lossy = plan.sync_method, plan.is_lossy
    elif compressor is not None:
        name, is_lossy = compressor_name(compressor), compressor.claims.is_lossy
    elif getattr(strategy, "world_size", 1) > 1 and (
        is_baseline(strategy) or not isinstance(strategy.model, DistributedDataParallel)
    ):
        name = type(strategy).__name__
        is_lossy = getattr(strategy, "is_lossy", False) if plan is None else plan.is_lossy
    elif (hook := comm_hook_of(strategy)) is None:
        name, is_lossy = "none", False
    else:
        name = str(getattr(hook, "__name__", type(hook).__name__))
        is_lossy = name != _LOSSLESS_HOOK_OF_TORCH
    return {"comm_hook": name, "is_lossy": is_lossy}


def describe_plan(strategy: Strategy) -> dict[str, Any]:
    """Returns the fields of `describe_hook`, and ``plan``, a `CommPlan`'s options; None if they cannot be written."""
    plan, options = plan_of(strategy), None
    if isinstance(plan, CommPlan):
        with suppress(ValueError):  # a compressor without a name
            options = plan.to_dict()
    return {**describe_hook(strategy), "plan": options}


def describe_tuning(strategy: Strategy) -> dict[str, Any]:
    """Returns the fields of the run's record that ``plan="auto"`` has determined so far; empty without it."""
    auto_plan, plan = getattr(strategy, "auto_plan", None), plan_of(strategy)
    tuning = {} if auto_plan is None else auto_plan.describe()
    if not tuning or plan is None:
        return {}
    return {"tuning": tuning, "plan_name": f"auto: {plan.name}", "is_lossy": plan.is_lossy}


def nccl_settings() -> dict[str, str]:
    """Returns NCCL's variables in the environment, by short name; empty without NCCL."""
    if not dist.is_available() or not dist.is_initialized() or "nccl" not in backends_of().values():
        return {}
    variables = {name: value for name, value in os.environ.items() if name in nccl_variables()}
    return {f"nccl.{name.removeprefix(PREFIX).lower()}": value for name, value in sorted(variables.items())}


def with_plan(settings: Settings, strategy: Strategy) -> Settings:
    """Returns the settings of a run with the plan of its strategy, if it has one."""
    plan = plan_of(strategy)
    if plan is None:
        return settings
    values = dict(settings.values)
    if isinstance(plan, ShardedPlan) and not any(name.endswith("data_parallel_size") for name in values):
        mesh = strategy.device_mesh  # type: ignore[attr-defined]  # every strategy with a ShardedPlan has one
        values |= {f"strategy.{dimension}_size": mesh[dimension].size() for dimension in mesh.mesh_dim_names}
    explicit, complete = flat(_plan_options(plan, is_short=True)), flat(_plan_options(plan))
    defaults = {name: value for name, value in complete.items() if name not in explicit}
    return dataclasses.replace(settings, values=values).with_plan(explicit, defaults, type(plan).__name__)


def _plan_options(plan: Plan, *, is_short: bool = False) -> dict[str, Any]:
    """Returns a plan's options in JSON types; ``is_short`` leaves out a compressor's options with default values."""
    try:
        options = plan.to_dict()
    except ValueError:
        without: Any = dataclasses.replace(plan, comm_hook=None)  # type: ignore[type-var]  # plans are dataclasses
        return {**without.to_dict(), "comm_hook": repr(plan.comm_hook)}
    if is_short and plan.comm_hook is not None:
        options["comm_hook"] = compressor_to_config(plan.comm_hook, with_defaults=False)
    return options


def _describe_ranks(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    return {
        "world_size": trainer.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "strategy": type(trainer.strategy).__name__,
    }
