"""Launches Triton kernels; a launch that a bucket repeats in every step skips Triton's own look-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import triton
from torch import Tensor

# Before Triton 3.3 a compiled kernel does not take its constants. On ROCm Triton also specialises on tensor sizes.
_repeats = tuple(map(int, version("triton").split(".")[:2])) >= (3, 3) and torch.version.hip is None
_prepared: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, int, int], *args: Tensor | int, **constants: Any) -> None:
    """Runs ``kernel`` on the device of its tensors.

    Triton takes 20 to 50 us to find the compiled kernel for some arguments. If device, grid, dtypes, constants,
    integers and the alignment of addresses are those of an earlier launch, its compiled kernel is launched at once.

    Args:
        kernel: a function that `triton.jit` decorates.
        grid: number of programs in each dimension.
        *args: arguments of the kernel up to the first constant; the first is a tensor.
        **constants: its constants, in any order, and Triton's options.
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
    prepared = _prepared.get(tuple(key))
    if prepared is not None:
        prepared[0](*given, *prepared[1])
        return
    with torch.cuda.device_of(first):
        compiled = kernel[grid](*args, **constants)
    if isinstance(compiled, triton.compiler.CompiledKernel) and first.get_device() == current:
        names = list(inspect.signature(kernel.fn).parameters)[len(args) :]
        _prepared[tuple(key)] = compiled[grid], tuple(constants[name] for name in names)
