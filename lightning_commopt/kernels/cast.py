"""Rounding to a narrower dtype, and what that drops.

Plain torch forms, which define the operations and run on CPU in chunks that stay in its cache, so that a bucket passes
through memory once. On CUDA one fused kernel each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.kernels.chunks import CHUNK_NUMEL, add_up, use_triton, wide_dtype


def narrow(flat: Tensor, residual: Tensor | None, scale: float, out: Tensor) -> None:
    """Rounds ``(flat + residual) * scale`` to the dtype of ``out``.

    Args:
        flat: ``(n,)`` floating point; left as it was.
        residual: ``(n,)`` floating point, or None for zeros; left as it was.
        scale: factor.
        out: ``(n,)`` narrower floating point.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import cast_triton

        return cast_triton.narrow(flat, residual, scale, out)
    scratch = flat.new_empty(min(CHUNK_NUMEL, flat.numel()), dtype=wide_dtype(flat.dtype))
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        part = flat[chunk]
        owed = None if residual is None else residual[chunk]
        out[chunk].copy_(add_up(part, owed, scratch[: part.numel()]).mul_(scale))
    return None


def keep_rest(flat: Tensor, residual: Tensor, scale: float, dtype: torch.dtype, finite: Tensor) -> None:
    """Replaces ``residual`` by what `narrow` dropped, if the step was finite.

    ``c = flat + residual``; ``residual = c - widened(narrowed(c * scale)) / scale``.

    Args:
        flat: ``(n,)`` as `narrow` had it.
        residual: ``(n,)`` as `narrow` had it; updated in place.
        scale: as `narrow` had it.
        dtype: of ``out`` in `narrow`.
        finite: 0-dim bool; if it is false, ``residual`` stays.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import cast_triton

        return cast_triton.keep_rest(flat, residual, scale, dtype, finite)
    if not finite:
        return None
    corrected, scaled = flat.new_empty(2, min(CHUNK_NUMEL, flat.numel()), dtype=wide_dtype(flat.dtype))
    sent = torch.empty_like(scaled, dtype=dtype)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        part = flat[chunk]
        size = part.numel()
        whole = add_up(part, residual[chunk], corrected[:size])
        rounded = sent[:size].copy_(torch.mul(whole, scale, out=scaled[:size]))
        residual[chunk].copy_(whole.sub_(scaled[:size].copy_(rounded).mul_(1 / scale)))
    return None
