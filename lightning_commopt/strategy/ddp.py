"""CommOptDDP: Lightning's DDPStrategy, made from a CommPlan."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import Compressor
from lightning_commopt.ddp.hook import attach_bucket_hook
from lightning_commopt.ddp.observed import ShowsExchanges, observed_wrapper, observers_of, register_observed_all_reduce
from lightning_commopt.ddp.rewrap import Trainable, gradient_bytes
from lightning_commopt.launch.lightning_launcher import RunsInOwnGroup, forget_previous_job
from lightning_commopt.plan import OptionError
from lightning_commopt.strategy.arguments import plan_from_arguments
from lightning_commopt.strategy.base import say_one_rank
from lightning_commopt.strategy.checks import (
    check_graph_is_static,
    check_none_unfrozen,
    explain_unused_parameters,
    warn_if_never_compressed,
    warn_of_fp16_under_scaler,
    warn_of_torchs_powersgd,
    warn_of_unused_residuals,
)
from lightning_commopt.strategy.plan_change import ChangesPlan
from lightning_commopt.validation import warn


class CommOptDDP(ChangesPlan, RunsInOwnGroup, ShowsExchanges):
    """Lightning's ``DDPStrategy`` with every option of how gradients travel, and compressors.

    Takes all that ``DDPStrategy`` takes, in the same order, so that its name can be replaced in any project. The
    keywords described here come on top; None leaves DDP's own default. With one process there is no wrapper and
    no hook.

    Args:
        accelerator: see ``DDPStrategy``, as for the other positional arguments.
        parallel_devices: see ``DDPStrategy``.
        cluster_environment: see ``DDPStrategy``.
        checkpoint_io: see ``DDPStrategy``.
        precision_plugin: see ``DDPStrategy``.
        ddp_comm_state: state of ``ddp_comm_hook``.
        ddp_comm_hook: one of torch's hooks, or any callable that DDP takes. Registered on CPU as well.
        ddp_comm_wrapper: wraps ``ddp_comm_hook``.
        model_averaging_period: see ``DDPStrategy``.
        process_group_backend: "gloo", "nccl", ...
        timeout: of the process group.
        start_method: "popen", "spawn", "fork" or "forkserver".
        static_graph: the graph and the set of used parameters are the same in every step. With gradient
            accumulation the first backward of a fit is exchanged, as DDP cannot do without.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy and their memory.
        bucket_cap_mb: MiB in a bucket, or a list of one number for each bucket.
        find_unused_parameters: look in every step for parameters without a gradient.
        comm_hook: how buckets are averaged: a name ("none", "bf16", "fp16", "powersgd", ...), a mapping of a name
            and options (``{"name": "powersgd", "matrix_rank": 2}``), or a compressor. Lossy but for "none" and
            "all_reduce".
        broadcast_buffers: send rank 0's buffers to all ranks before each forward.
        forward_sync_buffers: its successor (torch >= 2.13).
        init_sync: check and send parameters when the model is wrapped (torch >= 2.7).
        skip_all_reduce_unused_params: do not exchange what no rank used (torch >= 2.8).
        batched_grad_copy: copy gradients into buckets in batches (torch >= 2.12).
        lazy_bucket_allocation: allocate buckets in the first backward (torch >= 2.15).
        save_comm_state: keep in checkpoints, for all ranks, what ``comm_hook`` needs to go on exactly: with error
            feedback 4 bytes a parameter and rank. No option of a plan.
        **kwargs: further arguments of ``DistributedDataParallel``.

    Attributes:
        plan: the `CommPlan` that these options make.

    Raises:
        OptionError: an option is unknown, out of range, in contradiction to another, or not in the installed
            torch. It is both a ``ValueError`` and Lightning's ``MisconfigurationException``.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
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
        save_comm_state: bool = True,
        **kwargs: Any,
    ) -> None:
        self._plan, ddp_kwargs = plan_from_arguments(locals())
        if ddp_comm_hook is not None and self._plan.comm_hook is not None:
            raise OptionError(f"comm_hook={comm_hook!r} and ddp_comm_hook exclude each other: DDP takes one hook")
        forget_previous_job()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **ddp_kwargs,
        )
        self._save_comm_state = save_comm_state
        self._static_graph_is_recorded = False
        self._gradient_bytes = 0
        self._native_bytes = 0

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has handed to collectives since the strategy was made.

        With a compressor they are counted at the collectives; on DDP's native path and with ``ddp_comm_hook`` it
        is the size of the gradients, once for each backward that was synchronised.
        """
        sent = self._hook.bytes_sent if self._hook is not None else 0
        return sent + self._bytes_of_closed_hooks + self._native_bytes

    def configure_ddp(self) -> None:
        """Wraps the model, unless there is only one rank."""
        if self.world_size == 1:
            say_one_rank(comm_hook=self._plan.comm_hook, ddp_comm_hook=self._ddp_comm_hook)
            self._resume_restored()
            return
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._gradient_bytes = gradient_bytes(self.model)
        self._trainable = Trainable(self.model)
        self._static_graph_is_recorded = False
        self._pl_static_graph_delay_done = False
        self._resume_restored()

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        observers = observers_of(self)
        if self._plan.comm_hook is not None:
            if getattr(self.precision_plugin, "scaler", None) is not None:
                warn_of_fp16_under_scaler(self._plan.comm_hook)
            if self._plan.find_unused_parameters:
                warn_of_unused_residuals(self._plan.comm_hook)
            self._hook = attach_bucket_hook(
                self.model, self._plan.comm_hook, self._timeout, self._num_syncs, self.num_processes, observers
            )
        elif self._ddp_comm_hook is not None:
            self._register_torch_hook(self.model)
        elif observers:
            register_observed_all_reduce(self.model, observers)

    def _register_torch_hook(self, model: DistributedDataParallel) -> None:
        try:
            _register_ddp_comm_hook(
                model=model,
                ddp_comm_state=self._ddp_comm_state,
                ddp_comm_hook=self._ddp_comm_hook,
                ddp_comm_wrapper=observed_wrapper(self) if observers_of(self) else self._ddp_comm_wrapper,
            )
            if self.root_device.type != "cuda":
                warn_of_torchs_powersgd(self._ddp_comm_hook)
        except TypeError as error:
            if self.root_device.type == "cuda":
                raise
            warn(f"ddp_comm_hook has no effect on {self.root_device.type}: torch refuses it ({error}).")

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuses what would train each rank by itself, and a static graph that is not static.

        Raises:
            MisconfigurationException: a parameter that DDP does not know of asks for a gradient, or several
                optimizers are toggled under ``static_graph``.
        """
        super().pre_backward(closure_loss)
        if isinstance(self.model, DistributedDataParallel) and self._trainable is not None:
            check_none_unfrozen(self._trainable)
            if self.model.static_graph:
                assert self.lightning_module is not None
                check_graph_is_static(self.lightning_module)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends the first backward of a static graph under manual optimization, and counts the exchange."""
        super().post_backward(closure_loss)
        model = self.model
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        if model.static_graph and not self._static_graph_is_recorded:
            self._static_graph_is_recorded = True
            flushed_by_lightning = "post_backward" in vars(DDPStrategy)
            module = self.lightning_module
            if module is not None and not module.automatic_optimization and not flushed_by_lightning:
                model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
        self._num_syncs += 1
        if self._hook is None:
            self._native_bytes += self._gradient_bytes

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Blocks the exchange in backward, but for the first one of a static graph, which DDP needs."""
        if self._plan.static_graph and not self._static_graph_is_recorded:
            yield
        else:
            with super().block_backward_sync():
                yield

    def on_exception(self, exception: BaseException) -> None:
        """Says what to do about parameters without a gradient."""
        explain_unused_parameters(exception)

    def teardown(self) -> None:
        """Removes the wrapper, and ends the hook's worker and group."""
        try:
            self._keep_state_of_fit()
            super().teardown()
        finally:
            if self._hook is not None:
                warn_if_never_compressed(self._plan.comm_hook, self._num_syncs)
            self._close_hook()
            self._trainable = None
            self._restored = None
            self._num_syncs = 0
        if self._next_plan is not None:
            self._change_plan(self._next_plan)
