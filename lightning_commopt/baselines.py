"""Data parallelism without buckets, as a baseline for DDP: every parameter is its own bucket.

DDP compares the annotations of a hook by identity and reads its ``__qualname__``. Therefore this module has no
``from __future__ import annotations``, and the hook is a bound method.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.lightning import CommOptDDP
from lightning_commopt.measure.observer import ARRIVE, END, SEND, START, BucketInfo, Observers
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.plan.ddp import DDP_OPTION_SINCE, check_option_names, ddp_options
from lightning_commopt.strategy.arguments import OWN_OPTIONS, StartMethod, named_arguments
from lightning_commopt.sync.ddp.buckets import synced_parameters
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.observed import ObservedBuckets, TorchHook
from lightning_commopt.text.formatting import list_some

__all__ = ["InterleavedDP", "NaiveDP"]

_DDP_STRATEGY_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
_ONE_PARAMETER_MB = 1e-6  # about a byte, which DDP exceeds with the first parameter of each bucket


class ParameterwiseDP(CommOptDDP):
    """The base of `NaiveDP` and `InterleavedDP`, which differ in when gradients are averaged.

    In the first backward of a fit DDP has a single bucket. After that each parameter has a bucket, in the order in
    which rank 0 has computed the gradients. With several optimizers each has one from the start, in the reverse order
    of parameters.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments.
        **kwargs: nothing; DDP's own options have no effect here and raise an error.

    Raises:
        OptionError: an option is one of DDP's, unknown, or out of range.
    """

    is_baseline = True
    _hook: ClassVar[TorchHook | None] = None

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
        super().__init__(
            **arguments, bucket_cap_mb=_ONE_PARAMETER_MB, gradient_as_bucket_view=True, save_comm_state=False
        )
        self.gradient_sync = GradientSync(self.plan, self._hook)
        self._parameters: dict[str, Parameter] = {}

    def configure_ddp(self) -> None:
        if self.world_size > 1:
            super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        super()._register_ddp_hooks()
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        model.bucket_bytes_cap = sys.maxsize  # torch.compile cuts the graph at buckets of this size
        self._parameters = synced_parameters(model)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:  # toggled optimizers leave some parameters without a gradient
            self.apply_plan(dataclasses.replace(self.plan, find_unused_parameters=True))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Raises an error for gradients that would not be averaged."""
        if isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync:
            gradients = {name: values.grad for name, values in self._parameters.items() if values.requires_grad}
            missing = [name for name, gradient in gradients.items() if gradient is None]
            if missing and not self.plan.find_unused_parameters:
                raise MisconfigurationException(
                    f"backward gave no gradient to {list_some(missing, 8)}: these parameters were not"
                    " used in producing the loss. If that is intended, use CommOptDDP(find_unused_parameters=True), or"
                    " freeze them with requires_grad_(False); NaiveDP and InterleavedDP sync every parameter in every"
                    " step."
                )
            for name, gradient in gradients.items():
                if gradient is not None and gradient.layout != torch.strided:
                    raise MisconfigurationException(
                        f"{name!r} has a sparse gradient, and NaiveDP and InterleavedDP sync dense ones only. Use"
                        " CommOptDDP, or sparse=False in the embedding."
                    )
        super().post_backward(closure_loss)


class _SequentialAverages(ObservedBuckets):
    """Holds back gradients until all are ready, then averages one after another, and waits for each.

    Every rank multiplies its gradient by the reciprocal of the number of ranks, and the products are summed, as in DDP.
    `reduce` is the hook.
    """

    def __init__(self, model: DistributedDataParallel, observers: Observers) -> None:
        super().__init__(model, observers)
        self._group: dist.ProcessGroup = model.process_group
        self._reciprocal = 1 / dist.get_world_size(self._group)
        self._held: list[tuple[Tensor, BucketInfo, Future[Tensor]]] = []

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Returns a future of one gradient, which then holds the average."""
        flat = bucket.buffer()
        info = self._info(bucket, flat)
        if info.index == 0:
            self._held.clear()  # an earlier backward may have been interrupted
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        self._held.append((flat, info, future))
        if info.is_last:
            syncs = [self._observers.ready(held_info) for _, held_info, _ in self._held]
            for (gradient, held_info, averaged), sync in zip(self._held, syncs, strict=True):
                sync.note(START)
                gradient.mul_(self._reciprocal)
                sync.note(SEND)
                self._group.allreduce([gradient]).wait()
                sync.note(ARRIVE)
                sync.note(END, held_info.gradient_bytes)
                averaged.set_result(gradient)
            self._held.clear()
        return future


class _AfterBackward(TorchHook):
    """Registers the hook of `NaiveDP`."""

    def attach(self, model: DistributedDataParallel, observers: Observers) -> None:
        model.register_comm_hook(None, self.hook(model, observers).reduce)


class NaiveDP(ParameterwiseDP):
    """Textbook data parallelism: after backward, one all-reduce for each gradient, one after another.

    No communication is hidden behind backward, and every parameter pays the latency of a collective. The results are
    those of ``DDPStrategy``: the same bits on two ranks, and equal up to rounding on more. On CUDA the stream waits for
    each all-reduce, and the host runs ahead. The arguments are those of `ParameterwiseDP`.
    """

    _hook = _AfterBackward(_SequentialAverages)


class InterleavedDP(ParameterwiseDP):
    """Data parallelism that starts the all-reduce of each gradient when backward has computed it, without buckets.

    Communication is hidden behind backward, but every parameter pays the latency of a collective. The results are those
    of ``DDPStrategy``: the same bits on two ranks, and equal up to rounding on more. The arguments are those of
    `ParameterwiseDP`.
    """


def _refuse_options(strategy: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    ddp_names = {*ddp_options(), *DDP_OPTION_SINCE, *CommPlan.options(), *_DDP_STRATEGY_OPTIONS, *OWN_OPTIONS}
    for name in options:
        if name in ddp_names:
            raise OptionError(
                f"{name} has no effect in {strategy}, which averages every parameter's gradient by itself: leave it"
                " out, or use CommOptDDP"
            )
    check_option_names(options, known)
