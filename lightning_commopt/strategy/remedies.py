"""Errors and warnings of strategies about the model, the optimizers and the environment, each with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import MisconfigurationException, is_interactive, optimizer_is_toggled
from lightning_commopt.compressors import Cast, Compressor
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.base import FromPlan, is_baseline
from lightning_commopt.sync.strategies import LightningStrategy, RunningStrategy
from lightning_commopt.text.validation import info, warn, warn_once

if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.launcher import _Launcher
    from lightning.pytorch import LightningModule

    from lightning_commopt.sync.ddp.attach import Trainable

_EXPLANATIONS = {
    "Expected to have finished reduction in the prior iteration": (
        "It looks like your LightningModule has parameters that were not used in producing the loss returned by"
        " training_step. If that is intended (two optimizers that are toggled, for instance), use"
        " strategy=CommOptDDP(find_unused_parameters=True), or with DiLoCo"
        " CommOptDiLoCo(inner={'find_unused_parameters': True})."
    ),
    "got mixed torch.Tensor and DTensor": (
        "A sharded parameter was combined with a tensor that is not sharded. In a training_step it was not gathered,"
        " which its unit does in forward only. Parameters in no block are gathered by the forward of the module that"
        " was sharded: call self(...) in training_step rather than a part of the module, or shard that part, with"
        " shard(self.part, self.device_mesh, blocks=...). In a hook parameters in no block may still be gathered, after"
        " a forward without a backward, as in validation: call self.reshard() first. Lightning's"
        " StochasticWeightAveraging cannot average sharded parameters."
    ),
    "object has no attribute 'no_sync'": (
        "The object has no no_sync(). If it is trainer.model, that is the LightningModule itself, since nothing is"
        " synchronized in a backward with CommOptDiLoCo, nor on one rank with CommOptDDP. Use"
        " getattr(self.trainer.model, 'no_sync', contextlib.nullcontext)(), which works with and without DDP."
    ),
    "register_comm_hook or register_builtin_comm_hook can only be called once": (
        "DDP takes one comm hook, and has one already: the strategy's comm_hook or ddp_comm_hook, or one that the"
        " program has registered before. Leave out one of the two."
    ),
    "First bucket should be smaller/equal to other buckets": (
        "torch.compile cuts a module's graph at DDP's buckets, the first time after 1 MiB, and takes no smaller"
        " bucket_cap_mb: use at least 1, or torch._dynamo.config.optimize_ddp = 'no_optimization', which leaves the"
        " graph whole, so that all its gradients are ready at the same time."
    ),
}
"""For parts of error messages of torch or Python, the messages that replace these errors' messages."""


def refuse_ray(strategy: RunningStrategy) -> None:
    """Raises in a worker of Ray Train, which accepts only subclasses of its own strategies."""
    has_environment = any(cls.__module__.startswith("ray.train.") for cls in type(strategy.cluster_environment).__mro__)
    is_worker = "ray.train" in sys.modules and dist.is_available() and dist.is_initialized()
    if has_environment or (is_worker and dist.get_world_size() != strategy.num_nodes * strategy.num_processes):
        name = "CommOptDDP" if is_baseline(strategy) else type(strategy).__name__
        raise MisconfigurationException(
            f"In a worker of Ray Train use lightning_commopt.ray.{name}, with"
            " Trainer(plugins=[ray.train.lightning.RayLightningEnvironment()])."
        )


def repr_for_trainer(strategy: FromPlan) -> str:
    """Returns a ``repr`` that helps in the error of a Trainer that was given a strategy for Fabric."""
    name = type(strategy).__name__
    return (
        f"<lightning_commopt.fabric.{name} for Fabric, {strategy.plan.name};"
        f" for a Trainer there is lightning_commopt.{name}>"
    )


def check_start_method(launcher: _Launcher | None) -> None:
    """Raises if a launcher cannot start processes from a notebook, before Lightning's error recommends its own DDP."""
    if is_interactive() and launcher is not None and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            "CommOptDDP cannot start its processes in a notebook or an interactive interpreter with this start_method:"
            " use strategy='commopt_ddp_notebook' ('commopt_ddp_bf16_notebook', ...), CommOptDDP(start_method='fork',"
            " ...), or a script."
        )


def explain_one_rank(unused_hook: str | None) -> None:
    """Logs why a single rank has no wrapper, and names the option whose hook is therefore not used, if any."""
    info(
        "CommOptDDP: one process, so there are no gradients to synchronize: the model is trained without the"
        f" DistributedDataParallel wrapper{f'; {unused_hook} is not used' if unused_hook else ''}."
    )


def warn_of_unregistered_hook(hook: str, strategy: LightningStrategy) -> None:
    """Warns once that the option ``hook`` has no effect in a subclass that has not registered our hook."""
    name = type(strategy).__name__
    if isinstance(strategy.model, DistributedDataParallel):
        reason = (
            f"{name} wraps the model itself. Call self._register_ddp_hooks() at the end of its configure_ddp, or"
            " override _setup_model instead, which only wraps."
        )
    else:
        reason = (
            f"the configure_ddp of {name} does not wrap the LightningModule in DDP, with which hooks are registered."
            " Do not override configure_ddp; use find_unused_parameters=True if parts of the model are trained in turn."
        )
    warn_once(f"{hook} has no effect: {reason}")


def warn_of_rank_dependent_lbfgs(optimizers: Iterable[object]) -> None:
    """Warns once about an LBFGS whose number of closure calls, each with a backward, depends on this rank's loss."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and any(
            group["line_search_fn"] is not None or group["tolerance_change"] > 0 for group in optimizer.param_groups
        ):
            warn_once(
                "How often LBFGS evaluates its closure depends on the loss, which differs between ranks: a rank that"
                " evaluates it once more than the others waits for them in gradient sync until the timeout. Use"
                " LBFGS(line_search_fn=None, tolerance_change=0), which depends on the gradients only, or return a loss"
                " of the same value on all ranks: mean + (loss - loss.detach()), with the all-reduced mean."
            )


def warn_of_fp16_under_scaler(comm_hook: Compressor | None, precision: object) -> None:
    """Warns if ``comm_hook`` rounds gradients to float16 that a precision plugin's gradient scaler has multiplied."""
    if getattr(precision, "scaler", None) is None:
        return
    while isinstance(inner := getattr(comm_hook, "inner", None), Compressor):
        comm_hook = inner
    if isinstance(comm_hook, Cast) and comm_hook.dtype == torch.float16:
        warn(
            "comm_hook='fp16' rounds gradients that a gradient scaler has multiplied: those beyond float16's"
            " 65504 become infinite, and the scaler then skips the step. comm_hook='bf16' has float32's range."
        )


def warn_of_missing_buffers(model: DistributedDataParallel, plan: CommPlan) -> None:
    """Warns once about options for buffers if the wrapped model has no buffers."""
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        value = getattr(plan, name)
        if value is not None and not any(True for _ in model.module.buffers()):
            warn_once(f"{name}={value} has no effect: the model has no buffers.")


def check_backward(
    trainable: Trainable, module: LightningModule, optimizers: Sequence[torch.optim.Optimizer], *, is_static: bool
) -> None:
    """Raises if DDP, as it was set up, would not synchronize all gradients of the backward that begins."""
    if trainable.has_unfrozen(optimizers):
        raise MisconfigurationException(
            "A parameter was unfrozen within the training step, after DDP had built its buckets: each rank"
            " would train it by itself. Unfreeze in on_train_batch_start or earlier; or, if parameters are trained"
            " alternately, leave all unfrozen when fit starts and use CommOptDDP(find_unused_parameters=True)."
        )
    if is_static and optimizer_is_toggled(module) and len(module.trainer.optimizers) > 1:
        raise MisconfigurationException(
            "static_graph=True cannot be used with toggle_optimizer: each optimizer's backward gives gradients"
            " to other parameters. Use CommOptDDP(find_unused_parameters=True) without static_graph."
        )


def explain_error(exception: BaseException) -> None:
    """Replaces, in place, an exception's message that shows no remedy; see `_EXPLANATIONS`."""
    for message, explanation in _EXPLANATIONS.items():
        is_explained = [isinstance(arg, str) and message in arg for arg in exception.args]
        if any(is_explained):
            pairs = zip(is_explained, exception.args, strict=True)
            exception.args = tuple(explanation if is_replaced else arg for is_replaced, arg in pairs)


@contextmanager
def explain_changed_weights() -> Generator[None, None, None]:
    """Adds to autograd's error about weights modified after the forward that DiLoCo's exchanges modify weights, too."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            error.args = (
                f"{error} With CommOptDiLoCo an exchange may modify all weights after a step of the optimizer that was"
                " set up first: compute a loss after that step, or call its backward before the step.",
            )
        raise
