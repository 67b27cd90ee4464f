"""The first line of a rank's file of steps, which describes the run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import comm_hook_of
from lightning_commopt.compressors.registry import compressor_name
from lightning_commopt.strategy.base import plan_of

_LOSSLESS_HOOK_OF_TORCH = "allreduce_hook"


def run_header(trainer: Trainer) -> dict[str, Any]:
    """Returns rank, world_size, device, backend, strategy, comm_hook and is_lossy of a fit."""
    strategy = trainer.strategy
    device = strategy.root_device
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backend": dist.get_backend() if dist.is_available() and dist.is_initialized() else None,
        "strategy": type(strategy).__name__,
        **describe_hook(strategy),
    }


def describe_hook(strategy: Strategy) -> dict[str, Any]:
    """Returns the name of what averages the gradients as ``comm_hook``, and whether it changes them as ``is_lossy``."""
    plan = plan_of(strategy)
    if plan is not None and plan.comm_hook is not None:
        return {"comm_hook": compressor_name(plan.comm_hook), "is_lossy": plan.comm_hook.is_lossy}
    if getattr(strategy, "world_size", 1) > 1 and not isinstance(strategy.model, DistributedDataParallel):
        return {"comm_hook": type(strategy).__name__, "is_lossy": False}
    hook = comm_hook_of(strategy)
    if hook is None:
        return {"comm_hook": "none", "is_lossy": False}
    name = str(getattr(hook, "__name__", type(hook).__name__))
    return {"comm_hook": name, "is_lossy": name != _LOSSLESS_HOOK_OF_TORCH}
