"""Private names of torch; see `lightning_commopt.compat`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

# The store passes messages even if some ranks are missing, which a collective cannot do.
default_store = distributed_c10d._get_default_store

# These handle many small tensors in one call; torch's optimizers use them too.
foreach_copy_, foreach_mul_ = torch._foreach_copy_, torch._foreach_mul_

_NUM_RECORDED = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables with the number of collectives that the Flight Recorder keeps; the second is the name before torch 2.8."""

# Where both names are known, torch warns of the older one.
_KNOWS_NEW_NAME = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
FLIGHT_RECORDER_ON = {_NUM_RECORDED[0 if _KNOWS_NEW_NAME else 1]: "2000"}
"""The environment with which torch keeps 2000 collectives, its default from 2.11 on. Earlier ones keep none."""


def comm_hooks(model: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Returns the comm hooks of ``model``, each with its state; DDP has no public query for hooks."""
    return [*model._comm_hooks]


def registered_hooks(model: DistributedDataParallel) -> list[object]:
    """Returns the objects whose methods are the comm hooks of ``model``."""
    return [getattr(hook, "__self__", None) for hook, _ in comm_hooks(model)]


def bucket_parameters(model: DistributedDataParallel) -> list[list[int]]:
    """Returns the parameters in each bucket, or nothing until DDP has rebuilt its buckets. A backward locks this."""
    text = str(model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    return [[int(index) for index in bucket.split()] for bucket in text.split(",") if bucket.strip()]


def refresh_bucket_parameters(model: DistributedDataParallel) -> None:
    """Lets `bucket_parameters` see buckets that were rebuilt in the forward that has just ended."""
    if model.logger is not None:
        model.logger.set_runtime_stats_and_log()


def has_bucket_limits(model: DistributedDataParallel) -> bool:
    """Returns whether this torch has the private attribute that `first_bucket_parameters` reads."""
    return hasattr(model, "_bucket_config")


def first_bucket_parameters(model: DistributedDataParallel, parameters: list[Tensor]) -> list[list[int]]:
    """Returns the parameters in each bucket of the first backward of dense gradients, for a model just wrapped."""
    limits, _ = model._bucket_config.compute_bucket_size_limits(
        static_graph=model.static_graph, find_unused_parameters=model.find_unused_parameters
    )
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
    # DDP reverses them too, since gradients are produced in about the reverse order of the parameters.
    return buckets[::-1]


def stop_reducing(model: DistributedDataParallel) -> None:
    """Removes DDP's hooks from the parameters, so that another wrapper can add its own; its destructor may run late."""
    model.reducer._remove_autograd_hooks()


def hooks_of(module: Module) -> dict[str, Any]:
    """Returns the attributes of a module that hold its hooks: dictionaries by number, and a flag of backward hooks."""
    return {name: getattr(module, name) for name in vars(Module()) if "_hook" in name}


def hook_numbers(module: Module) -> set[int]:
    """Returns the numbers of a module's hooks, which no hook of any module has had before."""
    return {number for hooks in hooks_of(module).values() if isinstance(hooks, dict) for number in hooks}


def add_hooks(module: Module, hooks: dict[str, Any], left_out: set[int]) -> None:
    """Adds hooks of another module, from `hooks_of`, except those with the numbers ``left_out``.

    The handles of these hooks then remove them here.
    """
    for name, added in hooks.items():
        if isinstance(added, dict):
            for number in left_out & added.keys():
                del added[number]
            added.update(getattr(module, name))
            setattr(module, name, added)  # handles refer to this very dictionary
        elif added is not None:
            setattr(module, name, added)


def uses_python_reducer(model: DistributedDataParallel) -> bool:
    """Returns whether DDP was made without buckets, because of ``torch._dynamo.config.optimize_ddp``."""
    return bool(model._use_python_reducer)


def flush_static_graph(model: DistributedDataParallel) -> None:
    """Ends the first backward of a static graph whose forward was not called through the wrapper."""
    model.reducer._delay_all_reduce()  # type: ignore[attr-defined]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls a function when the backward that is running ends without an exception."""
    Variable._execution_engine.queue_callback(callback)


def call_after_all_reduces(callback: Callable[[], None]) -> None:
    """Calls a function when the backward that is running has ended and DDP has waited for its all-reduces."""
    # DDP waits in a callback after backward, too. A callback that is queued by a callback runs after that.
    call_after_backward(lambda: call_after_backward(callback))


def add_step_hook(optimizer: object, hook: Callable[..., None]) -> RemovableHandle | None:
    """Calls a function after every step of an optimizer, until the handle is removed.

    Returns None for an optimizer without hooks: a class that is not torch's, or that does not call torch's constructor,
    as those that step several optimizers at once.
    """
    try:
        handle: RemovableHandle = optimizer.register_step_post_hook(hook)  # type: ignore[attr-defined]
    except AttributeError:
        return None
    return handle


def is_in_backward() -> bool:
    """Returns whether a backward is running on this thread, or its callbacks."""
    return torch._C._current_graph_task_id() != -1


def sparse_values(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor that are sent; the public ``values()`` of a sparse tensor needs a sort first."""
    return tensor._values() if tensor.is_sparse else tensor


def turn_on_flight_recorder() -> None:
    """Makes torch record the collectives of process groups that do not exist yet, unless the user has set how many."""
    if not any(name in os.environ for name in _NUM_RECORDED):
        os.environ.update(FLIGHT_RECORDER_ON)


def flight_records() -> dict[str, Any]:
    """Returns the collectives that torch has recorded in this process, as in its JSON, the oldest first.

    Each backend may have its own recorder: gloo, NCCL's first backend ("nccl-legacy" since torch 2.15, "nccl" before),
    and its second backend, which records through a hook.

    Raises:
        RuntimeError: this torch has no recorder.
    """
    dumps = []
    if (dump := getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)) is not None:
        dumps = [partial(dump, backend=name) for name in ("gloo", "nccl", "nccl2", "nccl-lazy")]
        if "backend" not in (dump.__doc__ or ""):  # this torch has one recorder for all backends
            dumps = [dump]
    if (dump := getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)) is not None:
        dumps.append(dump)
    if not dumps:
        raise RuntimeError("this torch has no Flight Recorder")
    # Several dumps may come from one recorder, so each entry counts once.
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for dump in dumps:
        for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ()):
            key = (str(entry.get("process_group")), entry.get("collective_seq_id"), entry.get("p2p_seq_id"))
            entries.setdefault((*key, entry.get("profiling_name"), entry.get("time_created_ns")), entry)
    return {"entries": sorted(entries.values(), key=lambda entry: entry.get("time_created_ns", 0))}
