"""Errors and warnings of a strategy, each with a remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_commopt.compat.lightning import MisconfigurationException, optimizer_is_toggled
from lightning_commopt.compressors import Cast
from lightning_commopt.plan import CommPlan, OptionError, plan_options
from lightning_commopt.text.validation import warn

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_commopt.sync.attach import Trainable

_EXPLANATIONS = {
    "Expected to have finished reduction in the prior iteration": (
        "It looks like your LightningModule has parameters that were not used in producing the loss returned by"
        " training_step. If that is intended (two optimizers that are toggled, for instance), use"
        " strategy=CommOptDDP(find_unused_parameters=True)."
    ),
    "got mixed torch.Tensor and DTensor": (
        "A sharded parameter was used while it was not gathered, which its unit does in forward only. Parameters in no"
        " block are gathered by the forward of the module that was sharded: call self(...) in training_step rather than"
        " a part of the module, or shard that part, with shard(self.part, self.device_mesh, blocks=...)."
    ),
    "First bucket should be smaller/equal to other buckets": (
        "torch.compile cuts a module's graph at DDP's buckets, the first time after 1 MiB, and takes no smaller"
        " bucket_cap_mb: use at least 1, or torch._dynamo.config.optimize_ddp = 'no_optimization', which leaves the"
        " graph whole, so that all its gradients are ready at the same time."
    ),
}
"""For a part of torch's message, the message that replaces it."""


def check_backward(trainable: Trainable, module: LightningModule, is_static: bool) -> None:
    """Refuses a backward whose gradients DDP does not synchronize as it was set up."""
    if trainable.some_unfrozen():
        raise MisconfigurationException(
            "A parameter was unfrozen within the training step, after DDP had laid out its buckets: each rank"
            " would train it by itself. Unfreeze in on_train_batch_start or earlier; or, if parameters are trained"
            " alternately, leave all unfrozen when fit starts and use CommOptDDP(find_unused_parameters=True)."
        )
    if is_static and optimizer_is_toggled(module) and len(module.trainer.optimizers) > 1:
        raise MisconfigurationException(
            "static_graph=True cannot be used with toggle_optimizer: each optimizer's backward gives gradients"
            " to other parameters. Use CommOptDDP(find_unused_parameters=True) without static_graph."
        )


def check_plans_agree(plan: CommPlan) -> None:
    """Raises an OptionError if the ranks' plans differ; all ranks must call it."""
    plans: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(plans, {name: _describe(getattr(plan, name)) for name in plan_options()})
    for name in plan_options():
        first_ranks: dict[str, int] = {}
        for rank, options in enumerate(plans):
            first_ranks.setdefault(options[name], rank)
        if len(first_ranks) > 1:
            shown = ", ".join(f"{name}={value} on rank {rank}" for value, rank in first_ranks.items())
            raise OptionError(f"apply_plan must get the same plan on all ranks, got {shown}")


def _describe(value: Any) -> str:
    """Returns type and settings as text, without addresses in memory: equal on all ranks for equal settings."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_describe(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    fields = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    elif repr(value) != object.__repr__(value):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    settings = ", ".join(f"{name}={_describe(item)}" for name, item in fields.items())
    return f"{type(value).__qualname__}({settings})"


def warn_of_fp16_under_scaler(comm_hook: Any, precision: object) -> None:
    """Warns if gradients that the scaler of a precision plugin has multiplied are to be rounded to float16."""
    if getattr(precision, "scaler", None) is None:
        return
    while hasattr(comm_hook, "inner"):
        comm_hook = comm_hook.inner
    if isinstance(comm_hook, Cast) and comm_hook.dtype == torch.float16:
        warn(
            "comm_hook='fp16' rounds gradients that a gradient scaler has multiplied: those beyond float16's"
            " 65504 become infinite, and the scaler then skips the step. comm_hook='bf16' has float32's range."
        )


def explain_error(exception: BaseException) -> None:
    """Replaces those of torch's messages that do not show the remedy; see `_EXPLANATIONS`."""
    for message, explanation in _EXPLANATIONS.items():
        exception.args = tuple(explanation if message in str(each) else each for each in exception.args)
