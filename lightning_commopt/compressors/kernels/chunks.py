"""The parts in which the plain torch forms go through a bucket on CPU, and the dtype of their arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_NUMEL = 2**19
"""Elements: a few chunks stay in the last-level cache, and calls for each of them cost little."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the arithmetic: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def add_up(values: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``values + residual`` in ``out``, rounded to no dtype but that of ``out``."""
    if residual is None:
        return out.copy_(values)
    return torch.add(values, residual, out=out) if values.dtype == out.dtype else out.copy_(values).add_(residual)
