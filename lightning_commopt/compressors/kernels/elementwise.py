"""Operations on every element of a bucket: rounding to a narrower dtype, what that drops, and whether all are finite.

With ``c = flat + residual``, a rank sends ``rounded(c * scale)`` and keeps ``c - rounded(c * scale) / scale`` for the
next step. Example in bfloat16, whose numbers above 0.5 are 2**-8 apart, with ``scale = 0.5``: ``flat = [1]`` and
``residual = [2**-10]`` send ``[0.5]`` and keep ``[2**-10]``.

The plain torch forms define the operations. On CPU they work in chunks that stay in the cache, so that a bucket passes
through memory once. On CUDA each operation is one fused kernel, which gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels.dispatch import also_in

CHUNK_NUMEL = 2**19
"""Elements in a chunk, 2 MiB of float32: a few chunks fit in the last-level cache, and the calls for each of them cost
little. On a core with 1 MiB of second-level and 32 MiB of shared cache, chunks that fit the smaller one cost more in
calls than they saved."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which to compute, which is at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _add_up(values: Tensor, residual: Tensor | None, out: Tensor) -> Tensor:
    """Returns ``values + residual`` in ``out``, rounded only to the dtype of ``out``."""
    if residual is None:
        return out.copy_(values)
    return torch.add(values, residual, out=out) if values.dtype == out.dtype else out.copy_(values).add_(residual)


@also_in("triton")
def narrow(flat: Tensor, residual: Tensor | None, scale: float, out: Tensor) -> None:
    """Rounds ``(flat + residual) * scale`` to the dtype of ``out``.

    Args:
        flat: ``(n,)`` floating point; not changed.
        residual: ``(n,)`` floating point, or None for zeros; not changed.
        scale: multiplies the sums.
        out: ``(>= n,)`` of a narrower floating-point dtype; overwritten. Elements from ``n`` on become zero.
    """
    out[flat.numel() :].zero_()
    scratch = flat.new_empty(min(CHUNK_NUMEL, flat.numel()), dtype=wide_dtype(flat.dtype))
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = slice(start, min(start + CHUNK_NUMEL, flat.numel()))
        part = flat[chunk]
        added = None if residual is None else residual[chunk]
        out[chunk].copy_(_add_up(part, added, scratch[: part.numel()]).mul_(scale))


@also_in("triton")
def convert(values: Tensor, out: Tensor) -> None:
    """Copies ``values`` to another dtype. From bfloat16 to float32 torch's own copy takes twice as long on an H200.

    Args:
        values: ``(n,)`` floating point.
        out: ``(n,)`` of any floating-point dtype; overwritten.
    """
    out.copy_(values)


@also_in("triton")
def sum_rows(rows: Tensor, out: Tensor | None, rounded: Tensor, dtype: torch.dtype) -> None:
    """Adds up the rows, from the first to the last, in ``dtype``, and rounds the sums.

    Args:
        rows: ``(W, s)`` floating point.
        out: ``(s,)`` of ``dtype``, receives the sums; None if they are not needed.
        rounded: ``(s,)`` floating point, receives the sums rounded to its dtype.
        dtype: a wider floating-point dtype.
    """
    numel = rounded.numel()
    scratch, sums = rows.new_empty(2, min(CHUNK_NUMEL, numel), dtype=dtype)
    for start in range(0, numel, CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        part = sums[: numel - start] if out is None else out[chunk]
        part.copy_(rows[0, chunk])
        for row in rows[1:]:
            part.add_(scratch[: part.numel()].copy_(row[chunk]))
        rounded[chunk].copy_(part)


@also_in("triton")
def widen(flat: Tensor, residual: Tensor, mean: Tensor, scale: float, finite: Tensor) -> None:
    """Writes what `narrow` dropped to ``residual``, if the step was finite, and then the mean to ``flat``.

    Args:
        flat: ``(n,)`` the argument of `narrow`; overwritten.
        residual: ``(n,)`` the argument of `narrow`; updated in place.
        mean: ``(n,)`` the average of what all ranks sent, in the dtype that `narrow` rounded to.
        scale: the argument of `narrow`.
        finite: flags from `all_finite`; if any is false, ``residual`` stays. On CUDA the host does not wait for them.
    """
    if not finite.all():
        flat.copy_(mean)
        return
    corrected, scaled = flat.new_empty(2, min(CHUNK_NUMEL, flat.numel()), dtype=wide_dtype(flat.dtype))
    sent = torch.empty_like(scaled, dtype=mean.dtype)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = slice(start, start + CHUNK_NUMEL)
        part = flat[chunk]
        size = part.numel()
        whole = _add_up(part, residual[chunk], corrected[:size])
        rounded = sent[:size].copy_(torch.mul(whole, scale, out=scaled[:size]))
        residual[chunk].copy_(whole.sub_(scaled[:size].copy_(rounded).mul_(1 / scale)))
        part.copy_(mean[chunk])


@also_in("triton")
def add_lost(residual: Tensor, values: Tensor, rounded: Tensor, factor: int, finite: Tensor) -> None:
    """Adds ``(values - rounded) * factor`` to ``residual``, if the step was finite.

    Args:
        residual: ``(n,)`` floating point; updated in place.
        values: ``(n,)`` float32 or float64; overwritten.
        rounded: ``(n,)`` the rounded ``values``.
        factor: multiplies the difference.
        finite: flags from `all_finite`; if any is false, ``residual`` stays. On CUDA the host does not wait for them.
    """
    if finite.all():
        residual.add_(values.sub_(rounded).mul_(factor))


@also_in("triton")
def all_finite(values: Tensor) -> Tensor:
    """Returns whether there is no NaN and no infinity among ``values``; the host does not wait for the device.

    Args:
        values: ``(n,)`` floating point, contiguous.

    Returns:
        0-dim bool on the device of ``values``, or ``(k,)`` bool with one element for each part of them.
    """
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    # If there is a NaN, both extremes are NaN. On CPU isfinite().all() takes 30 times as long as this single pass.
    lowest, highest = torch.aminmax(values)
    return lowest.isfinite() & highest.isfinite()
