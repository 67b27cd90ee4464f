"""The operations of `cast` in Triton, one kernel each; what they do is defined there.

Arguments of all kernels: ``flat``, ``residual``, ``mean`` ... ``(numel,)`` as in `cast`; ``finite``, a bool that is
read on the device; ``WIDE``, the dtype of the arithmetic. A program works on ``BLOCK`` elements. The compiler may fuse
no multiplication with an addition: the numbers are those of plain torch.
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

_BLOCK = 4096


def narrow(flat: Tensor, residual: Tensor | None, scale: float, out: Tensor) -> None:
    """Rounds ``(flat + residual) * scale`` to ``out``."""
    added = flat if residual is None else residual
    _launch(_narrow, flat, added, out, SCALE=scale, HAS_RESIDUAL=residual is not None)


def widen(flat: Tensor, residual: Tensor, mean: Tensor, scale: float, finite: Tensor) -> None:
    """Writes what `narrow` dropped to ``residual``, if ``finite``, and ``mean`` to ``flat``."""
    _launch(_widen, flat, residual, mean, finite, SCALE=scale, INVERSE=1 / scale)


def add_lost(residual: Tensor, values: Tensor, rounded: Tensor, factor: int, finite: Tensor) -> None:
    """Adds ``(values - rounded) * factor`` to ``residual``, if ``finite``."""
    _launch(_add_lost, values, residual, rounded, finite, FACTOR=factor)


def _launch(kernel: Any, first: Tensor, *args: Any, **constants: Any) -> None:
    """Runs ``kernel`` over all elements of ``first``."""
    if first.numel():
        wide = tl.float64 if first.dtype == torch.float64 else tl.float32
        with torch.cuda.device_of(first):
            kernel[(triton.cdiv(first.numel(), _BLOCK),)](
                first.numel(), first, *args, **constants, WIDE=wide, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
            )


@triton.jit
def rounded_for(pointer, values):
    """Returns ``values`` as what ``pointer`` points to; on its way to 16 bits float64 becomes float32, as in torch."""
    if pointer.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return values.to(pointer.dtype.element_ty)


@triton.jit
def _elements(numel, BLOCK: tl.constexpr):
    """Returns which elements are this program's, and which of them there are."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return elements, elements < numel


@triton.jit
def _narrow(
    numel,
    flat,
    residual,
    out,
    SCALE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements, inside = _elements(numel, BLOCK)
    c = tl.load(flat + elements, inside, 0).to(WIDE)
    if HAS_RESIDUAL:
        c += tl.load(residual + elements, inside, 0).to(WIDE)
    tl.store(out + elements, rounded_for(out, c * SCALE), inside)


@triton.jit
def _widen(
    numel,
    flat,
    residual,
    mean,
    finite,
    SCALE: tl.constexpr,
    INVERSE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    elements, inside = _elements(numel, BLOCK)
    if tl.load(finite) != 0:
        c = tl.load(flat + elements, inside, 0).to(WIDE)
        c += tl.load(residual + elements, inside, 0).to(WIDE)
        sent = rounded_for(mean, c * SCALE).to(WIDE)
        tl.store(residual + elements, rounded_for(residual, c - sent * INVERSE), inside)
    average = tl.load(mean + elements, inside, 0)
    tl.store(flat + elements, rounded_for(flat, average), inside)


@triton.jit
def _add_lost(numel, values, residual, rounded, finite, FACTOR: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(finite) != 0:
        elements, inside = _elements(numel, BLOCK)
        lost = tl.load(values + elements, inside, 0).to(WIDE) - tl.load(rounded + elements, inside, 0).to(WIDE)
        kept = tl.load(residual + elements, inside, 0).to(WIDE) + lost * FACTOR
        tl.store(residual + elements, rounded_for(residual, kept), inside)
