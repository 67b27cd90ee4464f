"""How the kernels are dispatched, and the size of the parts in which they go through a bucket on CPU."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_commopt.kernels.compiled import loaded

CHUNK_NUMEL = 2**19
"""Elements: a few chunks stay in the last-level cache, and calls for each of them cost little."""


def use_triton(tensor: Tensor) -> bool:
    """Returns whether the fused form of a kernel runs for ``tensor``: on CUDA, where Triton is installed."""
    return tensor.is_cuda and has_triton()


def use_compiled(tensor: Tensor) -> bool:
    """Returns whether the form of a kernel in C runs for ``tensor``: float32 on CPU, where a compiler is installed."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and loaded() is not None


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to calculate in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def add_up(values: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``values + residual`` in ``out``, rounded to no dtype but that of ``out``."""
    if residual is None:
        return out.copy_(values)
    return torch.add(values, residual, out=out) if values.dtype == out.dtype else out.copy_(values).add_(residual)
