"""What the strategies for the Trainer and for Fabric share."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from lightning_commopt.compat.lightning import MisconfigurationException, is_interactive
from lightning_commopt.launch.nccl_variables import NcclOptions, find_mistakes
from lightning_commopt.plan import CommPlan, plan_options
from lightning_commopt.strategy.adapters import register_aliases
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from lightning_commopt.sync.store import fresh_default_store, prepare_key_spaces
from lightning_commopt.text.validation import info, warn_once
from lightning_commopt.watch.join_watch import watch_joining


class NamedStrategy:
    """A strategy that is made from a plan or by a name."""

    @classmethod
    def from_plan(cls, plan: CommPlan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan, or the path of a file that `CommPlan.save` wrote, and its other arguments."""
        plan = plan if isinstance(plan, CommPlan) else CommPlan.load(plan)
        return cls(**{name: getattr(plan, name) for name in plan_options()}, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_aliases(strategy_registry, cls)


def exchange_plan(ddp_kwargs: dict[str, Any], old: CommPlan, new: CommPlan) -> None:
    """Replaces one plan's options among the keywords of ``DistributedDataParallel`` by another's."""
    for name in old.ddp_kwargs():
        ddp_kwargs.pop(name, None)
    ddp_kwargs.update(new.ddp_kwargs())


def plan_of(strategy: object) -> CommPlan | None:
    """Returns the plan of a strategy of ours; None for the baselines, and for any other strategy."""
    plan = getattr(strategy, "plan", None)
    return plan if isinstance(plan, CommPlan) and not is_baseline(strategy) else None


def is_baseline(strategy: object) -> bool:
    """Returns whether a strategy or its class is one of `lightning_commopt.baselines`, whose plan nobody chooses."""
    return getattr(strategy, "is_baseline", False)


@contextmanager
def join_group(strategy: Any, *, watch: bool = True, nccl: NcclOptions | None = None) -> Generator[None, None, None]:
    """Has a strategy make its process group within: one that fits it, of this attempt of the job alone.

    It trains with its own number of processes then, whatever ran in this process before; a group of another size is an
    error. With ``watch`` it is reported what the group waits for.
    """
    backend = strategy.process_group_backend
    _prepare_nccl(nccl, backend, strategy.root_device)
    with watch_joining(strategy, backend) if watch else nullcontext() as watched, fresh_default_store():
        yield
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
            prepare_key_spaces()  # waits for all ranks, so that this one reports and answers until all have joined
    let_gloo_finish_at_exit()


def refuse_ray(strategy: Any) -> None:
    """Refuses to train in a worker of Ray Train, which takes subclasses of its own strategies only."""
    has_environment = any(cls.__module__.startswith("ray.train.") for cls in type(strategy.cluster_environment).__mro__)
    is_worker = "ray.train" in sys.modules and dist.is_available() and dist.is_initialized()
    if has_environment or (is_worker and dist.get_world_size() != strategy.num_nodes * strategy.num_processes):
        name = "CommOptDDP" if is_baseline(strategy) else type(strategy).__name__
        raise MisconfigurationException(
            f"In a worker of Ray Train use lightning_commopt.ray.{name}, with"
            " Trainer(plugins=[ray.train.lightning.RayLightningEnvironment()])."
        )


def check_start_method(launcher: Any) -> None:
    """Refuses a launcher that cannot start processes from a notebook, before Lightning does and names its own DDP."""
    if is_interactive() and launcher is not None and not launcher.is_interactive_compatible:
        raise MisconfigurationException(
            "CommOptDDP cannot start its processes in a notebook or an interactive interpreter with this start_method:"
            " use strategy='commopt_ddp_notebook' ('commopt_ddp_bf16_notebook', ...), CommOptDDP(start_method='fork',"
            " ...), or a script."
        )


def warn_of_local_decisions(optimizers: Iterable[Any]) -> None:
    """Warns of LBFGS where it decides by this rank's loss how often it calls its closure, which holds a backward."""
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
    """Sets NCCL's variables, and warns of mistakes in those of the environment. Before the process group is made."""
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
    """Logs on one rank why there is no wrapper, and the option whose hook has therefore nothing to do, if any."""
    info(
        "CommOptDDP: one process, so there are no gradients to synchronize: the model is trained without the"
        f" DistributedDataParallel wrapper{f'; {unused_hook} is not used' if unused_hook else ''}."
    )
