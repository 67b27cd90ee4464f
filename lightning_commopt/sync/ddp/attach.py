"""Attaches a compressor to DDP, and unwraps a model in the middle of training without loss of gradients."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import comm_hooks, stop_reducing, uses_python_reducer
from lightning_commopt.compressors import Compressor, Layout
from lightning_commopt.compressors.base import as_real
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import place_on_nodes
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.compressors.words import short_name
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import OptionError
from lightning_commopt.plan.base import option_errors
from lightning_commopt.sync.ddp.buckets import known_parameters, synced_parameters
from lightning_commopt.sync.ddp.hook import BucketHook
from lightning_commopt.sync.ddp.observed import ObservedBuckets, TorchHook
from lightning_commopt.sync.executors import Executor, SideStreams, WorkerThread
from lightning_commopt.sync.groups import borrow_groups, shared_node_groups
from lightning_commopt.sync.warm_up import compile_kernels, run_on_samples
from lightning_commopt.text.formatting import grouped
from lightning_commopt.text.validation import warn_once

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def place_compressor(
    model: DistributedDataParallel, compressor: Compressor, ranks_per_node: int | None
) -> tuple[Compressor, int | None]:
    """Returns the compressor adapted to the nodes, and the number of ranks per node if it uses nodes.

    Args:
        model: the wrapper whose process group has the ranks.
        compressor: the compressor.
        ranks_per_node: number of ranks on each node; None for torchrun's ``LOCAL_WORLD_SIZE``, or without it all ranks.

    Raises:
        OptionError: the model is neither on CPU nor on CUDA, or has another hook, or ``ranks_per_node`` does not divide
            the number of ranks.
    """
    if model.device_type not in ("cpu", "cuda"):
        raise OptionError(f"comm_hook works on cpu and cuda, but the model is on {model.device_type}")
    if find_foreign_hook(model) is not None:
        raise OptionError(
            "comm_hook cannot be used with a hook that the program has registered with DDP, which takes one hook: leave"
            " out one of the two"
        )
    world_size = dist.get_world_size(model.process_group)
    if ranks_per_node is None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    with option_errors("comm_hook: "):
        return place_on_nodes(compressor, world_size, ranks_per_node)


def find_foreign_hook(model: DistributedDataParallel) -> TorchHook | None:
    """Returns the comm hook that the program has registered with a wrapper; None if there is none but ours."""
    ours = BucketHook, ObservedBuckets
    others = [pair for pair in comm_hooks(model) if not isinstance(getattr(pair[0], "__self__", None), ours)]
    return TorchHook(*others[0]) if others else None


def attach_bucket_hook(
    model: DistributedDataParallel,
    compressor: Compressor,
    timeout: timedelta | None,
    step: int = 0,
    ranks_per_node: int | None = None,
    observers: Observers | None = None,
) -> BucketHook:
    """Makes DDP average its gradients with ``compressor``. All ranks must call it.

    On CPU a thread runs the compressor on one bucket after another during backward, so that all ranks issue the same
    collectives in the same order. It has its own process groups: the main thread may issue collectives at the same time
    (SyncBatchNorm, metrics), and so may the hooks of other modules, whose backwards may have another order on another
    rank. On CUDA the thread that runs backward enqueues everything on two side streams, which all hooks share, over
    DDP's own group.

    Args:
        model: a model that was just wrapped; DDP accepts one hook in its lifetime.
        compressor: the compressor, which is placed on the nodes by `place_compressor`.
        timeout: limit of collectives in the thread's groups; None for the backend's default.
        step: number of earlier gradient syncs.
        ranks_per_node: number of ranks on each node; None for torchrun's ``LOCAL_WORLD_SIZE``, or without it all ranks.
        observers: notified of every bucket.

    Raises:
        OptionError: the compressor cannot work with this model, its devices or its ranks.
    """
    compressor, ranks_per_node = place_compressor(model, compressor, ranks_per_node)
    if uses_python_reducer(model):
        raise OptionError(
            "comm_hook needs DDP's buckets, and torch._dynamo.config.optimize_ddp='python_reducer' makes none: set it"
            " to 'ddp_optimizer', its default, or to 'no_optimization'"
        )
    group: dist.ProcessGroup = model.process_group
    synced = synced_parameters(model)
    names = {id(parameter): name for name, parameter in synced.items()}
    warn_if_idle(compressor, synced.values())
    groups = None
    executor: Executor
    if model.device_type == "cpu":
        if compressor.claims.has_c_kernels:
            c_library.load()  # so that the first backward does not wait for the compiler
        groups = borrow_groups(group, ranks_per_node=ranks_per_node, timeout=timeout)
        channel, executor = Channel(groups.all_ranks, groups.within, groups.across), WorkerThread()
    else:
        nodes = () if ranks_per_node is None else shared_node_groups(group, ranks_per_node, timeout)
        if nodes:
            warn_of_launch_order(model)
        channel, executor = Channel(group, *nodes), SideStreams(model.device, num_streams=1 if nodes else 2)
        dtypes = {as_real(parameter).dtype for parameter in synced.values()}
        compile_kernels(lambda: run_on_samples(compressor, channel, dtypes, model.device), model.device, group)
    hook = BucketHook(compressor, channel, names, executor, step, observers, groups)
    model.register_comm_hook(None, hook.reduce)
    return hook


def warn_if_idle(compressor: Compressor, parameters: Iterable[Tensor]) -> None:
    """Warns once if a compressor would send the gradients of all parameters uncompressed."""
    by_dtype = grouped((as_real(parameter).dtype, as_real(parameter)) for parameter in parameters)
    reasons = {compressor.why_idle(Layout.of(same_dtype, dtype)) for dtype, same_dtype in by_dtype.items()}
    if reasons and None not in reasons:
        shown = "; ".join(sorted(map(str, reasons)))
        warn_once(f"comm_hook {short_name(compressor)!r} saves nothing here: {shown}.")


def warn_of_launch_order(module: Module) -> None:
    """Warns if our collectives and SyncBatchNorm's may run on several communicators at the same time.

    Our stream keeps our collectives in order, but not relative to SyncBatchNorm's. Their order on the device may differ
    between ranks, which can deadlock.

    Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
    """
    if os.environ.get(_LAUNCH_ORDER) != "1" and any(isinstance(part, SyncBatchNorm) for part in module.modules()):
        warn_once(
            "comm_hook 'hierarchical' together with SyncBatchNorm uses three NCCL communicators at the same time, which"
            f" can deadlock: set {_LAUNCH_ORDER}=1 in the environment of all ranks (NCCL 2.26 or newer)."
        )


class Trainable:
    """Compares a model's parameters with those that required a gradient when DDP wrapped it, which DDP synchronizes."""

    def __init__(self, model: DistributedDataParallel) -> None:
        parameters = list(known_parameters(model).values())
        self._trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._all = dict(model.module.named_parameters())

    def has_added(self, module: Module, optimizers: Iterable[Optimizer]) -> bool:
        """Returns whether optimizers have parameters that were added to the model since it was wrapped."""
        known = {id(parameter) for parameter in self._all.values()}
        added = [parameter for parameter in module.parameters() if id(parameter) not in known]
        return bool(select_optimized(added, optimizers))

    def keep_existing(self, module: Module, residuals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the residuals of parameters that the model still has."""
        existing = {name for name, parameter in module.named_parameters() if self._all.get(name) is parameter}
        return {name: residual for name, residual in residuals.items() if name in existing}

    def has_unfrozen(self, optimizers: Iterable[Optimizer]) -> bool:
        """Returns whether a parameter that optimizers have was unfrozen, so that DDP does not synchronize it."""
        return bool(select_optimized([parameter for parameter in self._frozen if parameter.requires_grad], optimizers))

    def has_frozen(self) -> bool:
        """Returns whether a parameter that DDP waits for was frozen."""
        return not all(parameter.requires_grad for parameter in self._trainable)

    def changed(
        self, model: DistributedDataParallel, optimizers: Iterable[Optimizer], *, counts_frozen: bool
    ) -> list[str]:
        """Returns the names of the parameters for which DDP's buckets are no longer right.

        Args:
            model: the wrapper.
            optimizers: optimizers; unfrozen and added parameters count if one of these has them.
            counts_frozen: whether parameters that were frozen count, too.
        """
        synced, known = {id(parameter) for parameter in self._trainable}, known_parameters(model)
        changed = {name: x for name, x in known.items() if x.requires_grad != (id(x) in synced)}
        trained = {id(parameter) for parameter in select_optimized(changed.values(), optimizers)}
        return [name for name, x in changed.items() if (id(x) in trained if x.requires_grad else counts_frozen)]

    @contextmanager
    def unfrozen(self, module: Module, *, takes_turns: bool) -> Generator[None, None, None]:
        """Returns a context for wrapping ``module`` in which parameters frozen since the last time require a gradient.

        If some parameters of the module are still trained, this is so only with ``takes_turns``: the frozen ones may
        then be frozen for this batch only. If none is, as in a step of another module, DDP would refuse the module.
        """
        unfreezes = takes_turns or not any(parameter.requires_grad for parameter in module.parameters())
        frozen = [parameter for parameter in self._trainable if unfreezes and not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


def select_optimized(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns the parameters that an optimizer has.

    Other parameters may belong to one rank only, such as a copy that a hook makes of the best weights so far.
    """
    if not (candidates := list(parameters)):
        return []
    optimized = {id(x) for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]}
    return [parameter for parameter in candidates if id(parameter) in optimized]


@contextmanager
def preserve_buffers(module: Module) -> Generator[None, None, None]:
    """Returns a context at whose end the buffers of ``module`` get back the values from its beginning."""
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def unwrap(model: DistributedDataParallel) -> Module:
    """Returns the module of a wrapper with its gradients. The wrapper must not be used afterwards."""
    stop_reducing(model)
    for parameter in model.module.parameters():
        if parameter.grad is not None and model.gradient_as_bucket_view:
            parameter.grad = parameter.grad.clone()  # it was a view of a bucket, which will be freed
    module: Module = model.module
    return module


def note_accumulated(module: Module) -> None:
    """Tells a new wrapper of a module which gradients were accumulated before, without changing them.

    With ``find_unused_parameters`` DDP does not average the gradients of parameters that no backward on any rank has
    reached since the last gradient sync. It learns which ones were reached from autograd hooks. A backward that adds
    zeros runs these hooks for the gradients that are already there.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            torch.autograd.backward(parameter, torch.zeros_like(parameter.grad))


class ResidualAdder:
    """Adds residuals to the next gradients of their parameters, once.

    Residuals of frozen parameters are kept: unfreezing a parameter makes the strategy wrap the model again, and the
    adder of the next wrapper adds them.

    Attributes:
        residuals: residuals that are not added yet, by parameter name and in the parameter's shape; those of complex
            parameters as pairs of real numbers.
    """

    def __init__(self, module: Module, residuals: dict[str, Tensor]) -> None:
        parameters = dict(module.named_parameters())
        self.residuals = {name: value for name, value in residuals.items() if name in parameters}
        trained = [name for name in self.residuals if parameters[name].requires_grad]
        self._handles = {name: self._add_once(name, parameters[name]) for name in trained}

    def _add_once(self, name: str, parameter: Parameter) -> RemovableHandle:
        def add(gradient: Tensor) -> Tensor:
            self._handles.pop(name).remove()
            total = as_real(gradient) + self.residuals.pop(name).to(as_real(gradient))
            return torch.view_as_complex(total) if gradient.is_complex() else total

        handle: RemovableHandle = parameter.register_hook(add)
        return handle

    def cancel(self) -> dict[str, Tensor]:
        """Stops adding, and returns the residuals that were not added yet."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        residuals, self.residuals = self.residuals, {}
        return residuals
