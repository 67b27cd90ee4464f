"""CommOptDDP for Lightning Fabric."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_commopt.compat.fabric import DDPBackwardSyncControl, StrategyRegistry
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.aliases import register_aliases
from lightning_commopt.strategy.arguments import plan_from_arguments
from lightning_commopt.strategy.base import (
    check_start_method,
    explain_one_rank,
    join_group,
    prepare_nccl,
    strategy_from_plan,
    warn_of_local_decisions,
)
from lightning_commopt.sync.attach import attach_bucket_hook
from lightning_commopt.sync.hook import BucketHook


class CommOptDDP(DDPStrategy):
    """Fabric's ``DDPStrategy`` with every option of how gradients travel, and compressors.

    The options are those of `lightning_commopt.CommOptDDP`. Each module that Fabric sets up gets a hook of its own.
    With one process there is no wrapper and no hook.

    Args:
        accelerator: see ``DDPStrategy``, as for the other positional arguments.
        parallel_devices: see ``DDPStrategy``.
        cluster_environment: see ``DDPStrategy``.
        checkpoint_io: see ``DDPStrategy``.
        precision: see ``DDPStrategy``.
        process_group_backend: "gloo", "nccl", ...
        timeout: of the process group.
        start_method: "popen", "spawn", "fork" or "forkserver".
        static_graph: see `CommPlan`, as for the other options.
        gradient_as_bucket_view: see `CommPlan`.
        bucket_cap_mb: see `CommPlan`.
        find_unused_parameters: see `CommPlan`.
        comm_hook: see `CommPlan`.
        broadcast_buffers: see `CommPlan`.
        forward_sync_buffers: see `CommPlan`.
        init_sync: see `CommPlan`.
        skip_all_reduce_unused_params: see `CommPlan`.
        batched_grad_copy: see `CommPlan`.
        lazy_bucket_allocation: see `CommPlan`.
        nccl: see `lightning_commopt.CommOptDDP`.
        watch: report what the process group waits for while it is made, and end a rank that joins in vain.
        **kwargs: further arguments of ``DistributedDataParallel``.

    Attributes:
        plan: the `CommPlan` that these options make.

    Raises:
        OptionError: an option is unknown, out of range, or not in the installed torch.
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
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
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
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        **kwargs: Any,
    ) -> None:
        self._plan, ddp_kwargs = plan_from_arguments(locals())
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **ddp_kwargs,
        )
        self._nccl = NcclOptions.from_config(nccl)
        self._watch = watch
        self._hooks: set[BucketHook] = set()
        self._earlier_bytes = 0
        self._backward_sync_control = _SyncControl()

    @classmethod
    def from_plan(cls, plan: CommPlan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan; see `strategy_from_plan`."""
        return strategy_from_plan(cls, plan, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistry) -> None:
        """Registers ``commopt_ddp`` and its variants, so that ``strategy="commopt_ddp_bf16"`` works."""
        register_aliases(strategy_registry, cls)

    @property
    def plan(self) -> CommPlan:
        """How gradients travel."""
        return self._plan

    def __repr__(self) -> str:
        """Returns what a Trainer shows in its error for a strategy that is not its own."""
        return (
            f"<lightning_commopt.fabric.CommOptDDP for Fabric, {self.plan.name};"
            " for a Trainer there are lightning_commopt.lightning.CommOptDDP and"
            " lightning_commopt.pytorch_lightning.CommOptDDP>"
        )

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank's compressors have handed to collectives; 0 without ``comm_hook``."""
        return self._earlier_bytes + sum(hook.bytes_sent for hook in tuple(self._hooks))

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        check_start_method(self._launcher)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Warns of an optimizer that cannot be used on several ranks as it is."""
        if self.world_size > 1:
            warn_of_local_decisions([optimizer])
        return super().setup_optimizer(optimizer)

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Wraps the module, unless there is only one rank."""
        if max(self.world_size, self.num_nodes * self.num_processes) == 1:
            explain_one_rank("comm_hook" if self._plan.comm_hook is not None else None)
            module._commopt_is_alone = True  # type: ignore[assignment]
            return module
        wrapped = super().setup_module(module)
        if self._plan.comm_hook is not None:
            hook = attach_bucket_hook(wrapped, self._plan.comm_hook, self._timeout, ranks_per_node=self.num_processes)
            self._hooks.add(hook)
            weakref.finalize(wrapped, self._close, hook).atexit = False
        return wrapped

    def _close(self, hook: BucketHook) -> None:
        self._hooks.remove(hook)
        self._earlier_bytes += hook.bytes_sent
        hook.close()

    def _setup_distributed(self) -> None:
        prepare_nccl(self._nccl, self.process_group_backend, self.root_device)
        with join_group(self, self.process_group_backend, watch=self._watch):
            super()._setup_distributed()


class _SyncControl(DDPBackwardSyncControl):
    """Skips gradient sync in backward, but for the first one of a static graph, which DDP needs."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if getattr(module, "_commopt_is_alone", False) is True:
            return nullcontext()
        if getattr(module, "static_graph", False) is True and not getattr(module, "_commopt_is_recorded", False):
            module._commopt_is_recorded = True  # type: ignore[assignment]
            return nullcontext()
        return super().no_backward_sync(module, enabled)
