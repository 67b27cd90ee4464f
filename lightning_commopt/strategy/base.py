"""What the strategies for Trainers and for Fabric share: joining the process group, plans, and wrapping in DDP."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from lightning_commopt.compat.lightning import MisconfigurationException, has_trainer
from lightning_commopt.launch.nccl_options import NcclOptions, restore_process, set_in_process
from lightning_commopt.launch.nccl_variables import find_mistakes
from lightning_commopt.plan import CommPlan, OptionError, Plan
from lightning_commopt.plan.ddp import ddp_options
from lightning_commopt.strategy.lightning_launcher import Launcher
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from lightning_commopt.sync.store import fresh_default_store, prepare_key_spaces
from lightning_commopt.sync.strategies import RunningStrategy, TrainersStrategy
from lightning_commopt.text.validation import warn_once
from lightning_commopt.watch.join_watch import watch_joining
from lightning_commopt.watch.peers import ORDERLY


class FromPlan:
    """A strategy that can be created from a plan. ``_timeout`` limits collectives; None stands for torch's default."""

    _timeout: timedelta | None

    @classmethod
    def from_plan(cls, plan: Plan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan, or from a file with one, and other arguments."""
        return cls(plan=plan, **kwargs)  # type: ignore[call-arg]

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in use."""

    @property
    def timeout(self) -> timedelta:
        return self._timeout or default_pg_timeout


class WrapsInDDP:
    """A strategy that gives the options of a plan to ``DistributedDataParallel``."""

    _ddp_kwargs: dict[str, Any]

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


def wrap_in_ddp(module: Module, device_ids: list[int] | None, ddp_kwargs: dict[str, Any]) -> DistributedDataParallel:
    """Wraps a module in DDP, in the current CUDA stream, which is the one that it trains in.

    Lightning wraps in a side stream. There DDP would not wait for an update of the parameters before it broadcasts
    them, and training would not wait for the broadcast. After wrapping the model a second time, the gradients of one
    bucket would be copied in two streams.
    """
    return DistributedDataParallel(module, device_ids=device_ids, **ddp_kwargs)


def replace_plan_options(ddp_kwargs: dict[str, Any], old: CommPlan, new: CommPlan) -> None:
    """Replaces the options of ``old`` by those of ``new`` in the keywords of ``DistributedDataParallel``, in place."""
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
    """Returns the context in which a strategy creates its process group.

    The group is isolated from earlier attempts of a torchrun job.

    Args:
        strategy: the strategy that creates the group.
        watch: whether to report which ranks the group waits for, and to end this rank if they cannot join any more.
        nccl: settings of NCCL, if any.

    Raises:
        MisconfigurationException: a process group exists already, and its size is not that of the strategy.
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
            # This waits for all ranks, so that this rank's watch keeps reporting and answering until all have joined.
            prepare_key_spaces()
    let_gloo_finish_at_exit()


def is_fit(strategy: TrainersStrategy) -> bool:
    """Returns whether the Trainer that a strategy belongs to is in a fit."""
    module = strategy.lightning_module
    # After a fit in spawned processes, the module in the process that started them is attached to no Trainer.
    return module is not None and has_trainer(module) and module.trainer.state.fn == "fit"


def own_exception(strategy: TrainersStrategy) -> BaseException | None:
    """Returns the exception that has ended the fit on this rank, and perhaps on no other, while it is handled."""
    module, exception = strategy.lightning_module, sys.exc_info()[1]
    is_interrupted = module is not None and has_trainer(module) and module.trainer.interrupted
    return exception if is_interrupted and type(exception).__name__ not in ORDERLY else None


def has_failed(strategy: TrainersStrategy) -> bool:
    """Returns whether this rank handles an error that has ended its fit; not Ctrl+C, which all ranks get."""
    return isinstance(own_exception(strategy), Exception | SystemExit)


def _prepare_nccl(options: NcclOptions | None, backend: str | None, device: torch.device) -> None:
    """Sets NCCL's variables before the process group is made, and warns about mistakes in the environment."""
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    if "nccl" not in backend:
        restore_process()
        if options is not None:
            warn_once(f"nccl has no effect: the process group's backend is {backend}.")
        return
    set_in_process(options)
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    for mistake in find_mistakes(os.environ, version=version):
        warn_once(f"NCCL: {mistake.what}")


def check_plans_agree(plan: Plan) -> None:
    """Raises an OptionError if the ranks' plans differ. All ranks must call it."""
    plans = values_of_all_ranks({name: _describe(getattr(plan, name)) for name in plan.options()})
    for name in plan.options():
        first_ranks: dict[str, int] = {}
        for rank, options in enumerate(plans):
            first_ranks.setdefault(options[name], rank)
        if len(first_ranks) > 1:
            shown = ", ".join(f"{name}={value} on rank {rank}" for value, rank in first_ranks.items())
            raise OptionError(f"apply_plan must get the same plan on all ranks, got {shown}")


def _describe(value: object) -> str:
    """Returns a value's type and settings as text, without memory addresses, so that equal values give equal text."""
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
