"""The operations of `cast` in Triton, one kernel each; what they do is defined there.

Arguments of all kernels: ``flat``, ``residual``, ``mean`` ... ``(numel,)`` as in `cast`; ``finite``, bools that are
read on the device, ``num_flags`` of them; ``WIDE``, the dtype of the arithmetic. A program works on ``BLOCK`` elements.
The compiler may fuse no multiplication with an addition: the numbers are those of plain torch.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.finite_triton import all_set
from lightning_commopt.compressors.kernels.launch_triton import launch
from lightning_commopt.compressors.kernels.memory_triton import load, store

_BLOCK = 4096


def narrow(flat: Tensor, residual: Tensor | None, scale: float, out: Tensor) -> None:
    """Rounds ``(flat + residual) * scale`` to ``out``."""
    added = flat if residual is None else residual
    args = (out, flat, added, flat.numel())
    _launch(_narrow, flat.dtype, *args, SCALE=scale, HAS_RESIDUAL=residual is not None)


def sum_rows(rows: Tensor, out: Tensor | None, rounded: Tensor, dtype: torch.dtype) -> None:
    """Adds up the rows, first to last, in ``dtype``, and rounds the sums."""
    constants = {"NUM_ROWS": len(rows), "ROWS_ALIGNED": rounded.numel() % 16 == 0, "HAS_OUT": out is not None}
    _launch(_sum_rows, dtype, rounded, rows, rounded if out is None else out, **constants)


def widen(flat: Tensor, residual: Tensor, mean: Tensor, scale: float, finite: Tensor) -> None:
    """Writes what `narrow` dropped to ``residual``, if ``finite``, and ``mean`` to ``flat``."""
    args = (flat, residual, mean, finite, finite.numel())
    _launch(_widen, flat.dtype, *args, SCALE=scale, INVERSE=1 / scale)


def add_lost(residual: Tensor, values: Tensor, rounded: Tensor, factor: int, finite: Tensor) -> None:
    """Adds ``(values - rounded) * factor`` to ``residual``, if ``finite``."""
    _launch(_add_lost, values.dtype, values, residual, rounded, finite, finite.numel(), FACTOR=factor)


def _launch(kernel: Any, dtype: torch.dtype, first: Tensor, *args: Any, **constants: Any) -> None:
    """Runs ``kernel`` over all elements of ``first``, with the arithmetic for numbers of ``dtype``."""
    if first.numel():
        wide = tl.float64 if dtype == torch.float64 else tl.float32
        grid, options = (-(-first.numel() // _BLOCK), 1, 1), {"num_warps": 8, "enable_fp_fusion": False}
        launch(kernel, grid, first, *args, first.numel(), **constants, WIDE=wide, BLOCK=_BLOCK, **options)


@triton.jit
def rounded_for(pointer, values):
    """Returns ``values`` as what ``pointer`` points to; on its way to 16 bits float64 becomes float32, as in torch."""
    if pointer.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return values.to(pointer.dtype.element_ty)


@triton.jit
def _elements(numel, BLOCK: tl.constexpr):
    """Returns which elements are this program's, which of them there are, and whether all are."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    elements = first + tl.arange(0, BLOCK)
    return elements, elements < numel, first + BLOCK <= numel


@triton.jit(do_not_specialize=["flat_numel", "numel"])
def _narrow(
    out,
    flat,
    residual,
    flat_numel,
    numel,
    SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements, inside, is_whole = _elements(flat_numel, BLOCK)
    c = load(flat + elements, inside, is_whole).to(WIDE)
    if HAS_RESIDUAL:
        c += load(residual + elements, inside, is_whole).to(WIDE)
    store(out + elements, rounded_for(out, c * SCALE), elements < numel, is_whole)


@triton.jit(do_not_specialize=["numel"])
def _sum_rows(
    rounded,
    rows,
    out,
    numel,
    NUM_ROWS: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr,
    HAS_OUT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements, inside, is_whole = _elements(numel, BLOCK)
    stride = tl.cast(numel, tl.int64)
    if ROWS_ALIGNED:
        stride = tl.multiple_of(stride, 16)
    total = load(rows + elements, inside, is_whole).to(WIDE)
    for row in range(1, NUM_ROWS):
        total += load(rows + row * stride + elements, inside, is_whole).to(WIDE)
    if HAS_OUT:
        store(out + elements, total, inside, is_whole)
    store(rounded + elements, rounded_for(rounded, total), inside, is_whole)


@triton.jit(do_not_specialize=["numel", "num_flags"])
def _widen(
    flat,
    residual,
    mean,
    finite,
    num_flags,
    numel,
    SCALE: tl.constexpr,
    INVERSE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements, inside, is_whole = _elements(numel, BLOCK)
    if all_set(finite, num_flags):
        c = load(flat + elements, inside, is_whole).to(WIDE)
        c += load(residual + elements, inside, is_whole).to(WIDE)
        sent = rounded_for(mean, c * SCALE).to(WIDE)
        store(residual + elements, rounded_for(residual, c - sent * INVERSE), inside, is_whole)
    average = load(mean + elements, inside, is_whole)
    store(flat + elements, rounded_for(flat, average), inside, is_whole)


@triton.jit(do_not_specialize=["numel", "num_flags"])
def _add_lost(
    values,
    residual,
    rounded,
    finite,
    num_flags,
    numel,
    FACTOR: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if all_set(finite, num_flags):
        elements, inside, is_whole = _elements(numel, BLOCK)
        lost = load(values + elements, inside, is_whole).to(WIDE) - load(rounded + elements, inside, is_whole).to(WIDE)
        kept = load(residual + elements, inside, is_whole).to(WIDE) + lost * FACTOR
        store(residual + elements, rounded_for(residual, kept), inside, is_whole)
