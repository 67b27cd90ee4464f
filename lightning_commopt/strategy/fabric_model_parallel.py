"""CommOptModelParallel for Lightning Fabric."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.strategy.arguments import document_plan_options, sharded_plan_from_arguments
from lightning_commopt.strategy.base import check_plans_agree
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.remedies import repr_for_trainer, warn_of_rank_dependent_lbfgs
from lightning_commopt.strategy.started import StartsRanks
from lightning_commopt.sync.checkpoint import KEY, gather_state, states_of_modules
from lightning_commopt.sync.fsdp2.checkpoint import resume, save_in_directory
from lightning_commopt.sync.fsdp2.model_sync import ShardedModelSync, set_unit_options

_SYNC = "_commopt_sync"
"""The attribute of a module that holds its sync, so that both live as long as the module."""


@document_plan_options
class CommOptModelParallel(StartsRanks, ModelParallelStrategy):
    """Fabric's ``ModelParallelStrategy`` with compressed gradients and parameters.

    It takes the arguments of ``ModelParallelStrategy`` in the same order, and the keywords below. Each module that
    Fabric sets up has its own sync. There is no ``accumulate_grads``, since ``fabric.no_backward_sync`` decides that.

    Args:
        parallelize_fn: see ``ModelParallelStrategy``, as for all arguments down to ``timeout``. With a ``comm_hook``
            all ranks are data-parallel, if ``data_parallel_size`` and ``tensor_parallel_size`` are both "auto".
        comm_hook: see `ShardedPlan`, as for all options down to ``reduce_scatter_max_input_buffers``.
        save_comm_state: save in checkpoints that hold an optimizer what ``comm_hook`` needs to resume exactly.
        nccl: see `lightning_commopt.CommOptDDP`.
        watch: report what the process group waits for while it is created, and end a rank that waits for ranks which
            cannot join any more.
        plan: a `ShardedPlan`, a `CommPlan`, or the path of a file with one; see
            `lightning_commopt.CommOptModelParallel`.
        **kwargs: refused; for an option of DDP the error says why it cannot apply.

    Raises:
        OptionError: an option is unknown or out of range, or needs a newer torch.
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        comm_hook: str | Mapping[str, Any] | ShardedCompressor | None = None,
        param_hook: Literal["int8"] | None = None,
        separate_reduce_scatter_group: bool = False,
        reduce_scatter_max_input_buffers: int | None = None,
        save_comm_state: bool = True,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        plan: ShardedPlan | CommPlan | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan, _, lightning_arguments = sharded_plan_from_arguments(dict(locals()))
        _check_plan(self._plan)
        self._saves_comm_state = save_comm_state
        self._nccl, self._watch = NcclOptions.from_config(nccl), watch
        # Loops over these run collectives, so their order must be equal on all ranks. That of a WeakSet is not.
        self._modules: WeakKeyDictionary[Module, None] = WeakKeyDictionary()
        forget_previous_job()
        super().__init__(**lightning_arguments)

    @classmethod
    def from_plan(  # type: ignore[override]
        cls, parallelize_fn: Any, plan: ShardedPlan | CommPlan | str | Path, **kwargs: Any
    ) -> Self:
        """Makes a strategy from a plan, or from a file with one, and other arguments."""
        return cls(parallelize_fn, plan=plan, **kwargs)

    @property
    def plan(self) -> ShardedPlan:
        """The plan in use."""
        return self._plan

    @property
    def wire_bytes(self) -> int | None:
        """Payload bytes of gradients handed to reduce-scatters, which count half; None without a ``comm_hook``."""
        known = [sync.wire_bytes for sync in self._syncs() if sync.wire_bytes is not None]
        return sum(known) if known else None

    __repr__ = repr_for_trainer

    def setup_environment(self) -> None:
        if self._plan.is_lossy and self._data_parallel_size == self._tensor_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup_module(self, module: Module) -> Module:
        module = super().setup_module(module)
        set_unit_options(module, self._plan)
        sync = ShardedModelSync(self._plan)
        sync.attach(module, ranks_per_node=self.num_processes, timeout=self._timeout)
        object.__setattr__(module, _SYNC, sync)  # an attribute that nn.Module does not manage
        self._modules[module] = None
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.world_size > 1:
            warn_of_rank_dependent_lbfgs([optimizer])
        return super().setup_optimizer(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Steps an optimizer. A new compressor that waits until the old residual is sent takes over afterwards."""
        output = super().optimizer_step(optimizer, **kwargs)
        for sync in self._syncs():
            sync.end_flush()
        return output

    def apply_plan(self, plan: ShardedPlan | CommPlan | str | Mapping[str, Any] | ShardedCompressor) -> None:
        """Changes the plan of all modules, also in the middle of training.

        All ranks must call it, with equal plans, between an optimizer step and the next forward. Arguments and errors
        are those of `lightning_commopt.CommOptModelParallel.apply_plan`.
        """
        plan = ShardedPlan.of(plan) if isinstance(plan, ShardedPlan | CommPlan) else self._plan.with_comm_hook(plan)
        _check_plan(plan)
        plan.check_torch()
        gc.collect()  # modules that nothing refers to any more must be gone on all ranks, not on some
        syncs = [*self._syncs()]
        for sync in syncs:
            sync.check_plan(plan)
        if syncs and self.world_size > 1:
            check_plans_agree(plan)
        for sync in syncs:
            sync.change_plan(plan)
        self._plan = plan

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        has_optimizer = any(isinstance(value, Optimizer) for value in state.values())
        states, saved = {}, {}
        for name, sync in _syncs_in(state) if self._saves_comm_state and has_optimizer else ():
            if sync.gradients is not None:
                own, in_directory = sync.gradients.state(), self._save_distributed_checkpoint
                gathered = gather_state(own, self, can_save=True, in_directory=in_directory)
                if gathered is not None:
                    states[name], saved[name] = own, gathered
        state = {**state, KEY: saved} if saved else state
        super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)
        if self._save_distributed_checkpoint:
            for name, own in states.items():
                save_in_directory(own, Path(self.broadcast(path)), name)

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint, and continues with the state of ``comm_hook`` for the modules in ``state``."""
        path = Path(self.broadcast(path))
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        saved = remainder.pop(KEY, None)
        syncs = dict(_syncs_in(state)) if isinstance(state, dict) else {}
        states = states_of_modules(saved, syncs)
        for name, sync in syncs.items():
            resume(sync, states.get(name), self, path, name)
        return remainder

    def _syncs(self) -> Iterator[ShardedModelSync]:
        return (getattr(module, _SYNC) for module in list(self._modules))


def _syncs_in(state: Mapping[str, Any]) -> Iterator[tuple[str, ShardedModelSync]]:
    """Yields the names of modules that were set up, and their syncs."""
    for name, value in state.items():
        if isinstance(sync := getattr(value, _SYNC, None), ShardedModelSync):
            yield name, sync


def _check_plan(plan: ShardedPlan) -> None:
    if plan.accumulate_grads != "sharded":
        raise OptionError(
            f"accumulate_grads={plan.accumulate_grads!r} cannot apply in Fabric: fabric.no_backward_sync decides when"
            " gradients are reduced"
        )
