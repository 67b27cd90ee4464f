"""Gives DDP the hook for a compressor, with the executor and the process groups that its device needs."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.torch import uses_python_reducer
from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.base import as_real
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.hierarchical import place_on_nodes
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.buckets import synced_parameters
from lightning_commopt.sync.executors import Executor, SideStreams, WorkerThread
from lightning_commopt.sync.groups import borrow_groups, shared_node_groups
from lightning_commopt.sync.hook import BucketHook
from lightning_commopt.sync.warm_up import compile_kernels
from lightning_commopt.text.validation import warn_once

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def place_compressor(
    model: DistributedDataParallel, compressor: Compressor, ranks_per_node: int | None
) -> tuple[Compressor, int | None]:
    """Returns a compressor as it can average the gradients of ``model``, with the ranks per node where it needs them.

    Args:
        model: wrapped.
        compressor: averages the buckets.
        ranks_per_node: see `attach_bucket_hook`.

    Raises:
        OptionError: the model is on another kind of device, DDP has no buckets, or nodes cannot be made of the ranks.
    """
    if model.device_type not in ("cpu", "cuda"):
        raise OptionError(f"comm_hook works on cpu and cuda, but the model is on {model.device_type}")
    world_size = dist.get_world_size(model.process_group)
    if ranks_per_node is None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    try:
        return place_on_nodes(compressor, world_size, ranks_per_node)
    except ValueError as error:
        raise OptionError(f"comm_hook: {error}") from error


def attach_bucket_hook(
    model: DistributedDataParallel,
    compressor: Compressor,
    timeout: timedelta | None,
    step: int = 0,
    ranks_per_node: int | None = None,
    observers: Observers | None = None,
) -> BucketHook:
    """Makes DDP average its gradients by ``compressor``. All ranks must call it.

    On CPU a thread runs the compressor on one bucket after another while backward goes on, so that all ranks issue the
    same collectives in the same order. It has process groups of its own: the main thread may issue collectives
    meanwhile (SyncBatchNorm, metrics), and so do the hooks of other modules, whose backwards may come in another order
    on another rank. On CUDA everything is enqueued by the thread that runs backward, on two side streams for all hooks,
    over DDP's own group.

    Args:
        model: freshly wrapped; DDP takes one hook in its life.
        compressor: averages the buckets.
        timeout: after which a collective of the thread's group raises; None for the backend's default.
        step: gradient syncs that were made before.
        ranks_per_node: that the launcher started; None for what torchrun says, else all ranks.
        observers: notified of every bucket.

    Raises:
        OptionError: see `place_compressor`.
    """
    compressor, ranks_per_node = place_compressor(model, compressor, ranks_per_node)
    if uses_python_reducer(model):
        raise OptionError(
            "comm_hook needs DDP's buckets, and torch._dynamo.config.optimize_ddp='python_reducer' does without: set it"
            " to 'ddp_optimizer', its default, or to 'no_optimization'"
        )
    group: dist.ProcessGroup = model.process_group
    synced = {id(parameter): parameter for parameter in synced_parameters(model)}
    names = {id(x): name for name, x in model.module.named_parameters() if id(x) in synced}
    groups = None
    executor: Executor
    if model.device_type == "cpu":
        if compressor.has_c_kernels:
            c_library.load()  # here, so that no backward waits for a compiler
        groups = borrow_groups(group, ranks_per_node=ranks_per_node, timeout=timeout)
        channel, executor = Channel(groups.all_ranks, groups.within, groups.across), WorkerThread()
    else:
        nodes = () if ranks_per_node is None else shared_node_groups(group, ranks_per_node, timeout)
        if nodes:
            warn_of_launch_order(model)
        channel, executor = Channel(group, *nodes), SideStreams(model.device, num_streams=1 if nodes else 2)
        dtypes = {as_real(parameter).dtype for parameter in synced.values()}
        compile_kernels(compressor, channel, dtypes, model.device, group)
    hook = BucketHook(compressor, channel, names, executor, step, observers, groups)
    model.register_comm_hook(None, hook.reduce)
    return hook


def warn_of_launch_order(module: Module) -> None:
    """Warns if collectives of ours and of SyncBatchNorm may be under way on several communicators at a time.

    Ours wait for each other by their stream, but for none of SyncBatchNorm, whose order on the device may then differ
    between ranks: a deadlock.

    Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
    """
    if os.environ.get(_LAUNCH_ORDER) != "1" and any(isinstance(each, SyncBatchNorm) for each in module.modules()):
        warn_once(
            "comm_hook 'hierarchical' beside SyncBatchNorm uses three NCCL communicators at a time, which can deadlock:"
            f" set {_LAUNCH_ORDER}=1 in the environment of all ranks (NCCL 2.26 or newer)."
        )
