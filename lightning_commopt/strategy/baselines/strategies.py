"""NaiveDP and InterleavedDP: data parallelism without buckets, to measure DDP and CommOptDDP against."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_commopt.compat.lightning import sync_module_states
from lightning_commopt.compat.torch import broadcast_coalesced, ignored_names, verify_shapes
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import DDP_OPTION_SINCE, OptionError, UnknownOptionError, ddp_options, plan_options
from lightning_commopt.strategy.arguments import OWN_OPTIONS, StartMethod, check_arguments, named_arguments
from lightning_commopt.strategy.base import join_group
from lightning_commopt.strategy.baselines.parameter_sync import AfterBackward, ParameterSync, WhileBackwardRuns
from lightning_commopt.strategy.lightning_launcher import configure_multirun_launcher, forget_previous_job
from lightning_commopt.text.validation import did_you_mean

_OPTIONS_OF_LIGHTNINGS_DDP = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_BROADCAST_BYTES = 250 * 1024 * 1024  # in one message of buffers, as in DDP


class ParameterwiseDP(DDPStrategy):
    """What `NaiveDP` and `InterleavedDP` share: everything except when gradients are averaged.

    It is a ``DDPStrategy`` to Lightning, but wraps nothing in ``DistributedDataParallel``.

    Args:
        accelerator: see ``DDPStrategy``, as for the others. DDP's own options have no meaning here and are refused.
        **kwargs: refused.

    Raises:
        OptionError: an option is one of DDP's, unknown, or out of range.
    """

    _sync_class: ClassVar[type[ParameterSync]]

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        **kwargs: Any,
    ) -> None:
        arguments = named_arguments(locals())
        _refuse_options(type(self).__name__, kwargs, known=sorted(arguments))
        check_arguments(arguments)
        forget_previous_job()
        super().__init__(**arguments)
        self.sync_observers = Observers()
        self._sync: ParameterSync | None = None
        self._earlier_bytes = 0
        self._is_blocked = False
        self._has_buffers = False
        self._buffers_are_due = False

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has handed to collectives since the strategy was made."""
        return self._earlier_bytes + (self._sync.bytes_sent if self._sync is not None else 0)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        configure_multirun_launcher(self)

    def setup_distributed(self) -> None:
        with join_group(self):
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Sends rank 0's parameters and buffers to all ranks, and prepares gradient sync, unless there is one rank."""
        if self.world_size == 1:
            return
        module = self.model
        assert module is not None
        ignored = ignored_names(module)
        parameters: list[Tensor] = [values for name, values in module.named_parameters() if name not in ignored]
        verify_shapes(_all_ranks(), parameters)
        sync_module_states(module)
        self._sync = self._sync_class(module, _all_ranks(), self.sync_observers)
        self._has_buffers = self._buffers_are_due = any(name not in ignored for name, _ in module.named_buffers())

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._send_buffers()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._send_buffers()
        return super().validation_step(*args, **kwargs)

    def _send_buffers(self) -> None:
        """Sends rank 0's buffers to all ranks if a synchronized backward came since that was last done, as DDP does."""
        if not self._buffers_are_due:
            return
        self._buffers_are_due = False
        module = self.model
        assert module is not None
        ignored = ignored_names(module)
        buffers = [buffer.detach() for name, buffer in module.named_buffers() if name not in ignored]
        broadcast_coalesced(_all_ranks(), buffers, _BROADCAST_BYTES, 0)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward; when the hooks for its end are called, the gradients are averages."""
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        is_synced = self._sync is not None and not self._is_blocked
        with self._sync.around_backward() if is_synced else nullcontext():  # type: ignore[union-attr]
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        # Under manual optimization DDP sends them at the start of a fit only: backward is within its forward there.
        self._buffers_are_due = self._has_buffers and is_synced and module.automatic_optimization
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        was_blocked, self._is_blocked = self._is_blocked, True
        try:
            yield
        finally:
            self._is_blocked = was_blocked

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._sync is not None:
                self._sync.close()
                self._earlier_bytes += self._sync.bytes_sent
                self._sync = None
            self._has_buffers = self._buffers_are_due = False


class NaiveDP(ParameterwiseDP):
    """Textbook data parallelism: after backward, one all-reduce for each gradient, one after another.

    No communication is hidden behind backward, and every parameter pays a collective's latency. Trains as
    ``DDPStrategy`` does: the same bits on two ranks, and to rounding on more. On CUDA each all-reduce is waited for by
    the stream, and the host runs ahead. Takes the arguments of `ParameterwiseDP`.
    """

    _sync_class = AfterBackward


class InterleavedDP(ParameterwiseDP):
    """Data parallelism that starts each gradient's all-reduce when backward has computed it, without buckets.

    Backward hides communication as far as it lasts, while every parameter pays a collective's latency. Trains as
    ``DDPStrategy`` does: the same bits on two ranks, and to rounding on more. Takes the arguments of `ParameterwiseDP`.
    """

    _sync_class = WhileBackwardRuns


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def _refuse_options(strategy: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    of_ddp = {*ddp_options(), *DDP_OPTION_SINCE, *plan_options(), *_OPTIONS_OF_LIGHTNINGS_DDP, *OWN_OPTIONS}
    for name in options:
        if name in of_ddp:
            raise OptionError(
                f"{name} has no effect in {strategy}, which averages every parameter's gradient by itself and wraps"
                " nothing in DistributedDataParallel: leave it out, or use CommOptDDP"
            )
        raise UnknownOptionError(
            f"unknown option {name!r}; known options: {', '.join(known)}{did_you_mean(name, known)}"
        )
