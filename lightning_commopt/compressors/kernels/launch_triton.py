"""Launches of Triton kernels that a bucket repeats in every step: only the first one asks Triton what to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import triton
from torch import Tensor

# Before, kernels do not take the constants that they were compiled with. On ROCm Triton also looks at sizes of tensors.
_repeats = tuple(map(int, version("triton").split(".")[:2])) >= (3, 3) and torch.version.hip is None
_prepared: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, int, int], *args: Tensor | int, **constants: Any) -> None:
    """Runs ``kernel`` on the device of its tensors.

    Triton takes 20 to 50 us to find what it has compiled for some arguments. The same device, grid, dtypes, constants,
    integers, and addresses that are multiples of 16 as before, need the same: then it is launched at once.

    Args:
        kernel: from `triton.jit`.
        grid: programs in each dimension.
        *args: of the kernel, up to the first constant; first a tensor.
        **constants: the rest of them, in any order, and Triton's options.
    """
    first = args[0]
    assert isinstance(first, Tensor)
    if not _repeats:
        with torch.cuda.device_of(first):
            kernel[grid](*args, **constants)
        return
    given: list[int] = []
    current = torch.cuda.current_device() if first.is_cuda else -1
    key: list[Any] = [id(kernel), first.get_device(), current, grid, *constants.values()]
    for arg in args:
        if isinstance(arg, Tensor):
            address = arg.data_ptr()
            given.append(address)
            key += (arg.dtype, address & 15)
        else:
            given.append(arg)
            key.append(arg)
    found = _prepared.get(tuple(key))
    if found is not None:
        found[0](*given, *found[1])
        return
    with torch.cuda.device_of(first):
        compiled = kernel[grid](*args, **constants)
    if isinstance(compiled, triton.compiler.CompiledKernel) and first.get_device() == current:
        names = list(inspect.signature(kernel.fn).parameters)[len(args) :]
        _prepared[tuple(key)] = compiled[grid], tuple(constants[name] for name in names)
