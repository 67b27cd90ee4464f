"""CommOptDDP, CommOptDiLoCo and CommOptModelParallel for Lightning Fabric."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.types import Optimizable
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commopt.compat.fabric import DDPBackwardSyncControl
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.arguments import StartMethod, document_plan_options, plan_from_arguments
from lightning_commopt.strategy.base import WrapsInDDP, check_plans_agree, replace_plan_options, wrap_in_ddp
from lightning_commopt.strategy.fabric_diloco import CommOptDiLoCo as CommOptDiLoCo
from lightning_commopt.strategy.fabric_model_parallel import CommOptModelParallel as CommOptModelParallel
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.remedies import (
    explain_one_rank,
    repr_for_trainer,
    warn_of_fp16_under_scaler,
    warn_of_missing_buffers,
    warn_of_rank_dependent_lbfgs,
)
from lightning_commopt.strategy.started import StartsRanks
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.modules import ModuleSyncs
from lightning_commopt.tune.auto_plan import without_choice
from lightning_commopt.tune.loop import LoopPlan


@document_plan_options
class CommOptDDP(StartsRanks, WrapsInDDP, DDPStrategy):
    """Fabric's ``DDPStrategy`` with all options of gradient sync, and with compressors.

    The options are those of `lightning_commopt.CommOptDDP`. Each module that Fabric sets up has its own gradient sync.
    With one process there is no wrapper and no hook.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments down to ``start_method``.
        static_graph: see `CommPlan`, as for all options down to ``lazy_bucket_allocation``.
        save_comm_state: save in checkpoints that hold an optimizer, for all ranks, what ``comm_hook`` needs to resume
            exactly; see ``docs/how_to/resume.md``.
        nccl: see `lightning_commopt.CommOptDDP`.
        watch: report what the process group waits for while it is created, and end a rank that waits for ranks which
            cannot join any more.
        plan: "auto" to choose buckets and compressors while the loop runs; see `lightning_commopt.CommOptDDP` and
            ``docs/how_to/auto.md``.
        lossy: see `lightning_commopt.CommOptDDP`.
        **kwargs: further arguments of ``DistributedDataParallel``.

    Attributes:
        plan: the `CommPlan` with the options of a plan.

    Raises:
        OptionError: an option is unknown or out of range, contradicts another one, or is missing in the installed
            torch.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        bucket_cap_mb: float | list[float] | None = None,
        find_unused_parameters: bool | None = None,
        comm_hook: str | dict[str, Any] | Compressor | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool | None = None,
        skip_all_reduce_unused_params: bool | None = None,
        batched_grad_copy: bool | None = None,
        lazy_bucket_allocation: bool | None = None,
        save_comm_state: bool = True,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        plan: CommPlan | str | Path | None = None,
        lossy: str | list[Any] = "never",
        **kwargs: Any,
    ) -> None:
        self._plan, tuned, lightning_arguments = plan_from_arguments(dict(locals()))
        forget_previous_job()
        super().__init__(**lightning_arguments)
        self._nccl = NcclOptions.from_config(nccl)
        self._watch = watch
        self._save_comm_state = save_comm_state
        self._syncs = ModuleSyncs(self)
        self._backward_sync_control = _SyncControl(self._syncs)
        self.auto_plan = LoopPlan(self, tuned, self._syncs, self._change_plan)

    @property
    def plan(self) -> CommPlan:
        return self._plan

    @property
    def sync_observers(self) -> Observers:
        """Observers that are notified of every bucket of every module. Add them before a module is set up."""
        return self._syncs.observers

    __repr__ = repr_for_trainer

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has sent since the strategy was made; see `GradientSync`."""
        return self._syncs.wire_bytes

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self.world_size > 1:
            warn_of_rank_dependent_lbfgs([optimizer])
        return super().setup_optimizer(optimizer)

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Steps an optimizer; with ``plan="auto"`` the plan may change after it."""
        output = super().optimizer_step(optimizer, **kwargs)
        self.auto_plan.end_optimizer_step(optimizer)
        return output

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        self.auto_plan.start_loop()
        if max(self.world_size, self.num_nodes * self.num_processes) == 1:
            explain_one_rank("comm_hook" if self._plan.comm_hook is not None else None)
        else:
            module = wrap_in_ddp(module, self._determine_ddp_device_ids(), self._ddp_kwargs)
        self._syncs.add(module, self._attach)
        return module

    def _attach(self, model: DistributedDataParallel, sync: GradientSync) -> None:
        warn_of_fp16_under_scaler(sync.plan.comm_hook, self.precision)
        warn_of_missing_buffers(model, sync.plan)
        sync.attach(model, timeout=self._timeout, ranks_per_node=self.num_processes)

    def apply_plan(self, plan: CommPlan | str | Mapping[str, Any] | Compressor) -> None:
        """Changes the plan of all modules, also in the middle of training.

        All ranks must call it, with equal plans. It takes effect at once, and must not be called between a forward and
        its backward, which would raise an error. Arguments and other errors are those of
        `lightning_commopt.CommOptDDP.apply_plan`.
        """
        if not isinstance(plan, CommPlan):
            plan = self._plan.with_comm_hook(plan)
        gc.collect()  # all ranks must have the same modules, also of those that nothing refers to any more
        self._change_plan(plan, self._syncs.attached())

    def _change_plan(self, plan: CommPlan, syncs: Sequence[GradientSync]) -> None:
        """Changes the plan of some modules, the same on all ranks, and of modules that are still to be set up."""
        for sync in syncs:
            sync.check_plan(plan)
        if syncs:
            check_plans_agree(plan)
        replace_plan_options(self._ddp_kwargs, self._plan, plan)
        self._plan = plan
        for sync in syncs:
            if (model := sync.model) is not None:
                sync.change_plan(plan, partial(self._wrap_again, model, sync))

    def _wrap_again(self, model: DistributedDataParallel, sync: GradientSync, module: Module) -> None:
        """Wraps a module again in the same wrapper, to which Fabric's module and the user may refer."""
        device_ids, is_training = self._determine_ddp_device_ids(), model.training
        DistributedDataParallel.__init__(model, module, device_ids=device_ids, **self._ddp_kwargs)
        model.training = is_training
        self._attach(model, sync)
        self._syncs.follow(model)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self._save_comm_state and any(isinstance(value, Optimizer) for value in state.values()):
            saved = self.auto_plan.add_choice(self._syncs.gather(state))
            state = {**state, KEY: saved} if saved else state
        super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint, and resumes the gradient-sync state of the modules in ``state``.

        A module that is not set up yet resumes when it is set up.
        """
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        modules = state if isinstance(state, dict) else {}
        saved = remainder.pop(KEY, None) if modules else remainder.get(KEY)
        if modules:
            self.auto_plan.resume_choice(saved)
        self._syncs.restore(without_choice(saved), modules)
        return remainder


class _SyncControl(DDPBackwardSyncControl):
    """Skips gradient sync in backward, except in the first one of a static graph, which DDP records."""

    def __init__(self, syncs: ModuleSyncs) -> None:
        self._syncs = syncs

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        sync = self._syncs.of(module)
        if sync is not None and (sync.model is None or sync.must_sync):
            return nullcontext()
        return super().no_backward_sync(module, enabled)
