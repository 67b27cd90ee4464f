"""The options of CommOptDDP for a Trainer, whichever package the Trainer is from."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.constants import default_pg_timeout
from typing_extensions import Self

from lightning_commopt.compat.lightning import MisconfigurationException, package_of
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.adapters import adapter_for
from lightning_commopt.strategy.aliases import register_aliases
from lightning_commopt.strategy.arguments import StartMethod, document_plan_options, plan_from_arguments
from lightning_commopt.strategy.base import strategy_from_plan
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.trainer import GradientSyncStrategy
from lightning_commopt.sync.gradient_sync import GradientSync
from lightning_commopt.sync.torch_hook import TorchHook


@document_plan_options
class CommOptStrategy(GradientSyncStrategy):
    """Lightning's ``DDPStrategy`` with every option of how gradients travel, and compressors.

    Takes all that ``DDPStrategy`` takes, in the same order, so that its name can be replaced in any project. The
    keywords described here come on top; None leaves DDP's own default. With one process there is no wrapper and
    no hook.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments down to ``start_method``.
        ddp_comm_hook: one of torch's hooks, or any callable that DDP takes. Registered on CPU as well.
        static_graph: see `CommPlan`, as for all options down to ``lazy_bucket_allocation``.
        save_comm_state: keep in checkpoints, for all ranks, what ``comm_hook`` needs to go on exactly: with error
            feedback 4 bytes a parameter and rank. No option of a plan.
        uneven_batches: what to do where ranks have different numbers of training batches, which makes DDP hang:
            "error"; "drop" to end epochs after the smallest number; "pad" to repeat batches up to the largest; "allow"
            to compare nothing, for training in which ranks need not step together. "drop" and "pad" need dataloaders
            with a length. No option of a plan.
        nccl: settings of NCCL: the name of a profile ("debug", "pcie", "ethernet", "infiniband"), or a mapping such as
            ``{"algo": "Ring", "min_nchannels": 16}``; see `NcclOptions`. What the environment has counts first. No
            option of a plan.
        watch: report which ranks a process group or an epoch waits for, compare the ranks' numbers of batches, and end
            a rank that waits in vain; see ``docs/errors.md``. With False a fit behaves as with ``DDPStrategy``, and
            ``uneven_batches`` has no effect. No option of a plan.
        **kwargs: further arguments of ``DistributedDataParallel``.

    Attributes:
        gradient_sync: the `GradientSync` that carries the gradients.
        plan: the `CommPlan` that these options make.

    Raises:
        OptionError: an option is unknown, out of range, in contradiction to another, or not in the installed
            torch. It is both a ``ValueError`` and Lightning's ``MisconfigurationException``.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
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
        uneven_batches: Literal["error", "drop", "pad", "allow"] = "error",
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        **kwargs: Any,
    ) -> None:
        plan, self._lightnings_arguments = plan_from_arguments(locals())
        torch_hook = None
        if ddp_comm_hook is not None:
            torch_hook = TorchHook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        self.gradient_sync = GradientSync(plan, torch_hook)
        self._nccl = NcclOptions.from_config(nccl)
        self._save_comm_state = save_comm_state
        self._uneven_batches = uneven_batches
        self._watch = watch
        forget_previous_job()
        super().__init__(**self._lightnings_arguments)

    @classmethod
    def from_plan(cls, plan: CommPlan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan; see `strategy_from_plan`."""
        return strategy_from_plan(cls, plan, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers ``commopt_ddp`` and its variants, so that ``strategy="commopt_ddp_bf16"`` works."""
        register_aliases(strategy_registry, cls)

    @property
    def accelerator(self) -> Any:
        """The accelerator of the Trainer."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # The first that a Trainer does with a strategy.
        if package_of(accelerator) != package_of(self):
            self._move_to(package_of(accelerator))
        self._accelerator = accelerator

    def _move_to(self, package: str) -> None:
        """Becomes the strategy for the Trainer of another package.

        Raises:
            MisconfigurationException: it is of a class that is derived from one package's `CommOptDDP`.
        """
        adapter = adapter_for(package)
        if type(self) is not adapter_for(package_of(self)):
            raise MisconfigurationException(
                f"{type(self).__name__} is a strategy for {package_of(self)}.Trainer. For {package}.Trainer it must be"
                f" derived from {adapter.__module__}.CommOptDDP."
            )
        ddp_kwargs = self._ddp_kwargs
        self.__class__ = adapter
        super().__init__(**self._lightnings_arguments)
        self._ddp_kwargs = ddp_kwargs  # of the present plan

    def __repr__(self) -> str:
        """Returns what Fabric shows in its error for a strategy that is not its own."""
        return (
            f"<{type(self).__module__}.CommOptDDP for {package_of(self)}.Trainer, {self.plan.name};"
            " for Fabric there is lightning_commopt.fabric.CommOptDDP>"
        )
