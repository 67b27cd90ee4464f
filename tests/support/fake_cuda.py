"""Runs code on tensors of a CUDA device that is not there, and tells a `Machine` of everything that it launches.

Tensors are FakeTensors: they have shapes, devices and memory that they share, and no values. torch's operations are
seen by a dispatch mode, Triton's kernels where they are launched, collectives where the channel issues them. NCCL is a
stream for each group; a collective keeps its tensors until it is waited for, as ProcessGroupNCCL does.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from lightning_commopt.compressors import channel
from lightning_commopt.compressors.kernels import dispatch, factors_triton, launch_triton, low_rank_tiles_triton
from lightning_commopt.sync import executors
from support import moved_bytes
from support.machine import NCCL, Clock, Machine

DEVICE = torch.device("cuda", 0)
_CACHES = (
    executors._side_streams,
    low_rank_tiles_triton.plan_for,
    factors_triton._plan_for,
)


@contextmanager
def cuda_on(machine: Machine, world_size: int = 2) -> Iterator[None]:
    """Makes ``machine`` the device ``cuda:0``, with NCCL between so many ranks in every group."""
    stream_class = _stream_class(machine)
    in_stream: dict[str, Any] = {
        "Stream": stream_class,
        "stream": lambda stream: machine.on(stream.name),
        "current_stream": lambda device=None: stream_class(name=machine.current),
        "device_of": lambda tensor: nullcontext(),
        "synchronize": lambda device=None: machine.wait_on_host(),
    }
    tensors: dict[str, Any] = {
        "record_stream": lambda tensor, stream: machine.record(tensor, stream.name),
        "pin_memory": lambda tensor, *args: tensor,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **in_stream))
        stack.enter_context(mock.patch.multiple(torch.Tensor, **tensors))
        stack.enter_context(mock.patch.object(channel, "dist", _nccl(machine, world_size)))
        stack.enter_context(mock.patch.object(channel, "backends_of", return_value={"cuda": "nccl"}))
        stack.enter_context(mock.patch.object(executors, "Future", _future_class(machine)))
        stack.enter_context(mock.patch.object(JITFunction, "run", _triton_launcher(machine)))
        stack.enter_context(mock.patch.object(launch_triton, "_repeats", False))  # FakeTensors have no address
        stack.enter_context(mock.patch.object(dispatch, "has_triton", return_value=True))
        stack.callback(_clear_caches)
        _clear_caches()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Operations(machine))
        stack.enter_context(torch.no_grad())
        yield


def _fakes_copies() -> bool:
    try:
        with FakeTensorMode():
            torch.zeros(1, device=DEVICE).copy_(torch.ones(1, device=DEVICE))
    except RuntimeError:
        return False
    return True


needs_fake_copies = pytest.mark.skipif(not _fakes_copies(), reason="this torch wants a driver to copy FakeTensors")
"""For tests of whole steps. torch 2.6 is such a torch."""


def _clear_caches() -> None:
    """What they hold of one machine is of no use to another."""
    for cached in _CACHES:
        cached.cache_clear()


def _stream_class(machine: Machine) -> Any:
    class Stream:
        num_made = 0

        def __init__(self, device: Any = None, priority: int = 0, name: str | None = None) -> None:
            Stream.num_made += name is None
            self.name = name or f"side {Stream.num_made}"
            if name is None:
                machine.priorities[self.name] = priority

        def wait_stream(self, other: Stream) -> None:
            machine.wait(self.name, machine.now(other.name))

    return Stream


def _future_class(machine: Machine) -> Any:
    class Future:
        """As torch's for CUDA: a result is there when the current stream has come so far, for whoever waits."""

        def __init__(self, devices: Any = None) -> None:
            self._event = Clock()
            self._value: Any = None

        def __class_getitem__(cls, item: Any) -> Any:
            return cls

        def set_result(self, value: Tensor) -> None:
            self._value, self._event = value, machine.now(machine.current)

        def set_exception(self, error: Exception) -> None:
            self._value = error

        def wait(self) -> Tensor:
            machine.wait(machine.current, self._event)
            machine.record(self._value, machine.current)
            return self._value

    return Future


class _Work:
    def __init__(self, machine: Machine, event: Clock, tensors: tuple[Tensor, ...]) -> None:
        self._machine = machine
        self._event = event
        self._kept: tuple[Tensor, ...] = tensors

    def wait(self) -> None:
        self._machine.wait(self._machine.current, self._event)
        self._kept = ()


def _nccl(machine: Machine, world_size: int) -> Any:
    def start(name: str, received: Tensor, sent: Tensor, group: Any) -> _Work:
        stream = f"{NCCL}{group}"
        machine.order(stream, machine.now(machine.current))
        machine.launch(name, [sent], [received], stream)
        return _Work(machine, machine.now(stream), (received, sent))

    def all_reduce(tensor: Tensor, group: Any, async_op: bool) -> _Work:
        return start("all_reduce", tensor, tensor, group)

    def with_two_tensors(name: str) -> Any:
        return lambda received, sent, group, async_op: start(name, received, sent, group)

    names = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    return types.SimpleNamespace(
        **{name: getattr(dist, name) for name in ("ProcessGroup", "Work")},
        get_world_size=lambda group=None: world_size,
        get_rank=lambda group=None: 0,
        get_process_group_ranks=lambda group: list(range(world_size)),
        all_reduce=all_reduce,
        **{name: with_two_tensors(name) for name in names},
    )


class _Operations(TorchDispatchMode):
    """Tells the machine of torch's operations, and of those for which the host waits."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func.name(), func._schema
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.is_cuda for x in inputs) and name.startswith(("aten::_local_scalar_dense", "aten::nonzero")):
            self._machine.wait_on_host(self._machine.current)
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return result  # a view
        if name.startswith(("aten::detach", "prim::")):
            return result
        if any(x.is_cuda for x in (*inputs, *outputs)):
            named = zip(schema.arguments, args, strict=False)
            given = [*named, *((each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs)]
            written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
            writes = [x for x in (*tree_leaves(written), *outputs) if isinstance(x, Tensor) and x.is_cuda]
            if name.startswith(moved_bytes.ALLOCATIONS):
                self._machine.allocate(outputs)
                return result
            num_bytes = moved_bytes.of_operation(name, [x for x in inputs if x.is_cuda], writes)
            self._machine.launch(name, inputs, writes, num_bytes=num_bytes)
            if len({x.device for x in (*inputs, *outputs)}) > 1 and name.startswith(("aten::_to_copy", "aten::copy_")):
                is_blocking = not kwargs.get("non_blocking", len(args) > 2 and args[2])
                if is_blocking and all(x.dim() or x.is_cuda for x in inputs):  # a number travels with its launch
                    self._machine.wait_on_host(self._machine.current)
        return result


def _triton_launcher(machine: Machine) -> Any:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        writes = [given[name] for name in written_by(kernel)]
        constants = {name for name in given if name not in kernel.arg_names}
        constants |= {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        whatever = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        details = ", ".join(
            f"{name}={value if name in constants else _specialised_on(value)}"
            for name, value in sorted(given.items())
            if name not in whatever
        )
        name = kernel.fn.__name__
        num_bytes = moved_bytes.of_kernel(name, given)
        machine.launch(f"{name}({details})", given.values(), writes, num_bytes=num_bytes)

    return run


def _specialised_on(value: Any) -> str:
    """Returns what Triton compiles anew for, beside constants: dtypes, 1, and what is divisible by 16."""
    if isinstance(value, Tensor):
        is_aligned = not value.numel() or value.storage_offset() * value.element_size() % 16 == 0
        return f"{value.dtype} {'aligned' if is_aligned else 'not aligned'}"
    assert isinstance(value, int)
    return "1" if value == 1 else "sixteens" if value % 16 == 0 else "any"


@cache
def written_by(kernel: Any) -> frozenset[str]:
    """Returns which arguments of a Triton kernel it stores to, itself or in functions that it calls."""
    return _stored_and_returned(kernel)[0]


@cache
def _stored_and_returned(kernel: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Returns to which arguments a Triton function stores, and from which ones come pointers that it returns."""
    (definition,) = ast.parse(kernel.src).body
    pointers: dict[str, set[str]] = {name: {name} for name in kernel.arg_names}
    stored: set[str] = set()
    returned: set[str] = set()

    def called(node: ast.Call) -> Any:
        function = kernel.fn.__globals__.get(node.func.id) if isinstance(node.func, ast.Name) else None
        return function if isinstance(function, triton.JITFunction) else None

    def given(node: ast.Call, names: frozenset[str]) -> set[str]:
        arguments = zip(called(node).arg_names, node.args, strict=False)
        return {behind_it for name, argument in arguments if name in names for behind_it in behind(argument)}

    def behind(node: ast.AST) -> set[str]:
        """The arguments that an expression is computed from by pointer arithmetic."""
        if isinstance(node, ast.Call):
            if called(node) is not None:
                return given(node, _stored_and_returned(called(node))[1])
            is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "to"
            return behind(node.func.value) if is_cast else set()  # type: ignore[attr-defined]
        if isinstance(node, ast.Name):
            return pointers.get(node.id, set())
        return {name for child in ast.iter_child_nodes(node) for name in behind(child)}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for name in (x for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)):
                pointers[name.id] = behind(node.value)
        if isinstance(node, ast.Return) and node.value is not None:
            returned.update(behind(node.value))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "store":
                stored.update(behind(node.args[0]))
            elif called(node) is not None:
                stored.update(given(node, written_by(called(node))))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(definition)
    return frozenset(stored), frozenset(returned)
