"""What the strategies for Trainers and for Fabric share: joining a group, and errors and warnings with remedies."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from typing_extensions import Self

from lightning_commopt.compat.lightning import (
    MisconfigurationException,
    has_trainer,
    is_interactive,
    optimizer_is_toggled,
)
from lightning_commopt.compat.sigterm import SigtermCheck, broadcasts_sigterm
from lightning_commopt.compressors import Cast, Compressor
from lightning_commopt.launch.nccl_variables import NcclOptions, find_mistakes
from lightning_commopt.plan import CommPlan, OptionError, ddp_options, plan_options
from lightning_commopt.plan_base import Plan
from lightning_commopt.strategy.adapters import register_aliases
from lightning_commopt.strategy.lightning_launcher import Launcher
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from lightning_commopt.sync.store import fresh_default_store, prepare_key_spaces
from lightning_commopt.sync.strategies import RunningStrategy, TrainersStrategy, trainer_of
from lightning_commopt.text.validation import info, warn, warn_once
from lightning_commopt.watch.join_watch import watch_joining

if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.launcher import _Launcher
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.pytorch import LightningModule
    from torch.nn.parallel import DistributedDataParallel

    from lightning_commopt.sync.ddp.attach import Trainable

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
"""For a part of an error message of torch, the message that replaces it."""


class WithTimeout:
    """A strategy with a timeout for collectives, which is torch's default if the argument was None."""

    _timeout: timedelta | None

    @property
    def timeout(self) -> timedelta:
        return self._timeout or default_pg_timeout


class NamedStrategy(WithTimeout):
    """A strategy that wraps modules in DDP, and that can be made from a plan or by a registered name."""

    _ddp_kwargs: dict[str, Any]

    @classmethod
    def from_plan(cls, plan: CommPlan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan, or from a file that `CommPlan.save` wrote, and other arguments."""
        plan = plan if isinstance(plan, CommPlan) else CommPlan.load(plan)
        return cls(**{name: getattr(plan, name) for name in plan_options()}, **kwargs)

    @contextmanager
    def without_init_sync(self) -> Generator[None, None, None]:
        """Returns a context in which modules are wrapped without sending parameters, if this torch can do that.

        The parameters must be equal on all ranks.
        """
        is_added = "init_sync" in ddp_options() and "init_sync" not in self._ddp_kwargs
        if is_added:
            self._ddp_kwargs["init_sync"] = False
        try:
            yield
        finally:
            if is_added:
                self._ddp_kwargs.pop("init_sync", None)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        register_aliases(strategy_registry, cls)


def exchange_plan(ddp_kwargs: dict[str, Any], old: CommPlan, new: CommPlan) -> None:
    """Replaces the options of one plan by those of another among the keywords of ``DistributedDataParallel``."""
    for name in old.ddp_kwargs():
        ddp_kwargs.pop(name, None)
    ddp_kwargs.update(new.ddp_kwargs())


def plan_of(strategy: object) -> Plan | None:
    """Returns the plan of a strategy of ours; None for baselines and other strategies."""
    plan = getattr(strategy, "plan", None)
    return plan if isinstance(plan, Plan) and not is_baseline(strategy) else None


def is_baseline(strategy: object) -> bool:
    """Returns whether a strategy or its class is one of `lightning_commopt.baselines`, whose plan is fixed."""
    return getattr(strategy, "is_baseline", False)


@contextmanager
def join_group(
    strategy: RunningStrategy, *, watch: bool = True, nccl: NcclOptions | None = None
) -> Generator[None, None, None]:
    """Returns the context in which a strategy makes its process group.

    The group is isolated from earlier attempts of a torchrun job.

    Args:
        strategy: the strategy, which knows its ranks.
        watch: whether to report what the group waits for, and to end a rank that joins in vain.
        nccl: settings of NCCL, if any.

    Raises:
        MisconfigurationException: the group that exists has another size than the strategy.
    """
    backend = strategy.process_group_backend
    _prepare_nccl(nccl, backend, strategy.root_device)
    with watch_joining(strategy, backend) if watch else nullcontext() as watched, fresh_default_store():
        yield
        if isinstance(strategy.launcher, Launcher):
            strategy.launcher.has_joined = True
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() != strategy.world_size:
            raise MisconfigurationException(
                f"{type(strategy).__name__} was made for {strategy.world_size} processes, but the process group that"
                f" exists has {dist.get_world_size()}. Probably an earlier training run in this process left it behind:"
                " call torch.distributed.destroy_process_group() and remove LOCAL_RANK and WORLD_SIZE from the"
                " environment after each run, or start every run in a process of its own (commopt-train does)."
            )
        if watched is not None:
            watched.note_joined()
        if strategy.world_size > 1 and dist.is_initialized():
            # This waits for all ranks, so that the watch of this rank reports and answers until all have joined.
            prepare_key_spaces()
    let_gloo_finish_at_exit()


def is_fit(strategy: TrainersStrategy) -> bool:
    """Returns whether the Trainer that a strategy belongs to is in a fit."""
    module = strategy.lightning_module
    # After a fit in spawned processes the module of the process that started them belongs to no trainer.
    return module is not None and has_trainer(module) and module.trainer.state.fn == "fit"


def check_sigterm(strategy: TrainersStrategy, every_n_steps: int | None) -> SigtermCheck | None:
    """Replaces Lightning's check for SIGTERM in a fit of several ranks; returns None if there is nothing to replace."""
    if every_n_steps is None or not is_fit(strategy):
        return None
    if strategy.world_size == 1:
        info(f"sigterm_every_n_steps={every_n_steps} has no effect: there is only one process.")
        return None
    trainer = trainer_of(strategy)
    if not broadcasts_sigterm(trainer):
        warn_once(
            f"sigterm_every_n_steps={every_n_steps} has no effect: this version of Lightning does not broadcast SIGTERM"
            " between batches; those from 2.5.2 on do."
        )
        return None
    return SigtermCheck(trainer, every_n_steps)


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


def check_start_method(launcher: _Launcher | None) -> None:
    """Raises if a launcher cannot start processes from a notebook, before Lightning's error recommends its own DDP."""
    if is_interactive() and launcher is not None and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            "CommOptDDP cannot start its processes in a notebook or an interactive interpreter with this start_method:"
            " use strategy='commopt_ddp_notebook' ('commopt_ddp_bf16_notebook', ...), CommOptDDP(start_method='fork',"
            " ...), or a script."
        )


def warn_of_local_decisions(optimizers: Iterable[object]) -> None:
    """Warns about LBFGS if it decides by this rank's loss how often it calls its closure, which runs a backward."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and any(
            group["line_search_fn"] is not None or group["tolerance_change"] > 0 for group in optimizer.param_groups
        ):
            warn_once(
                "LBFGS decides by the loss, which differs between ranks, how often it evaluates its closure: a rank"
                " that evaluates it once more waits for the others in gradient sync until the timeout. Use"
                " LBFGS(line_search_fn=None, tolerance_change=0), which decides by the gradients only, or return a"
                " loss of the same value on all ranks: mean + (loss - loss.detach()), with the all-reduced mean."
            )


def _prepare_nccl(options: NcclOptions | None, backend: str | None, device: torch.device) -> None:
    """Sets NCCL's variables before the process group is made, and warns about mistakes in the environment."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if "nccl" not in backend:
        if options is not None:
            warn_once(f"nccl has no effect: the process group's backend is {backend}.")
        return
    if options is not None:
        options.apply()
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    for mistake in find_mistakes(os.environ, version=version):
        warn_once(f"NCCL: {mistake.what}")


def explain_one_rank(unused_hook: str | None) -> None:
    """Logs why a single rank has no wrapper, and names the option whose hook is therefore not used, if any."""
    info(
        "CommOptDDP: one process, so there are no gradients to synchronize: the model is trained without the"
        f" DistributedDataParallel wrapper{f'; {unused_hook} is not used' if unused_hook else ''}."
    )


def check_backward(trainable: Trainable, module: LightningModule, is_static: bool) -> None:
    """Raises if DDP, as it was set up, would not synchronize all gradients of the backward that begins."""
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


def check_plans_agree(plan: Plan) -> None:
    """Raises an OptionError if the ranks' plans differ; all ranks must call it."""
    plans: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(plans, {name: _describe(getattr(plan, name)) for name in plan.options()})
    for name in plan.options():
        first_ranks: dict[str, int] = {}
        for rank, options in enumerate(plans):
            first_ranks.setdefault(options[name], rank)
        if len(first_ranks) > 1:
            shown = ", ".join(f"{name}={value} on rank {rank}" for value, rank in first_ranks.items())
            raise OptionError(f"apply_plan must get the same plan on all ranks, got {shown}")


def _describe(value: object) -> str:
    """Returns the type and the settings as text that is equal on all ranks, without addresses in memory."""
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


def warn_of_fp16_under_scaler(comm_hook: Compressor | None, precision: object) -> None:
    """Warns if gradients that a precision plugin's scaler has multiplied are rounded to float16."""
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


def explain_error(exception: BaseException) -> None:
    """Replaces messages of torch that show no remedy; see `_EXPLANATIONS`."""
    for message, explanation in _EXPLANATIONS.items():
        exception.args = tuple(explanation if message in str(arg) else arg for arg in exception.args)
