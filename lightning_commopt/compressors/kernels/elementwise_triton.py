"""The operations of `elementwise` in Triton, one kernel each; `elementwise` defines what they do.

Arguments of all kernels: ``flat``, ``residual``, ``mean`` and others ``(numel,)`` as in `elementwise`; ``finite``,
``num_flags`` bools that are read on the device; ``WIDE``, the dtype of the arithmetic. A program works on ``BLOCK``
elements. The compiler may not fuse multiplications with additions, so that the numbers are those of plain torch.

Only the last tile of a bucket is read and written with a mask. A mask that depends on a size which Triton does not know
to be a multiple of 16 makes every access narrow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.launch_triton import launch

_BLOCK, _NUM_WARPS = 1024, 4
"""Elements and warps of a program: 8 elements for each thread, two wide accesses of float32. With 4096 and 8, `widen`
takes 12 % longer on an H200 (``benchmarks/kernel_tiles.py``)."""
_FINITE_BLOCK = 8192
"""Elements per flag, and flags that are combined at a time. A check only reads, so its registers suffice for more than
`_BLOCK`, with fewer flags."""


def narrow(flat: Tensor, residual: Tensor | None, scale: float, out: Tensor) -> None:
    """Rounds ``(flat + residual) * scale`` to ``out``."""
    added = flat if residual is None else residual
    args = (out, flat, added, flat.numel())
    _launch(_narrow, flat.dtype, *args, SCALE=scale, HAS_RESIDUAL=residual is not None)


def convert(values: Tensor, out: Tensor) -> None:
    """Copies ``values`` to the dtype of ``out``."""
    _launch(_convert, values.dtype, out, values)


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


def all_finite(values: Tensor) -> Tensor:
    """Returns whether ``values`` ``(n,)`` are finite, one flag for all of them."""
    num_blocks = -(-values.numel() // _FINITE_BLOCK)
    flags = torch.empty(num_blocks, dtype=torch.bool, device=values.device)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    if num_blocks:
        launch(_find_bad, (num_blocks, 1, 1), values, flags, values.numel(), BLOCK=_FINITE_BLOCK, **options)
    if num_blocks <= 1:
        return flags
    # Every program of a kernel that depends on the flags reads all of them.
    whole = torch.empty(1, dtype=torch.bool, device=values.device)
    launch(_combine_flags, (1, 1, 1), whole, flags, num_blocks, BLOCK=_FINITE_BLOCK, **options)
    return whole


def _launch(kernel: Any, dtype: torch.dtype, first: Tensor, *args: Any, **constants: Any) -> None:
    """Runs ``kernel`` over all elements of ``first``, with the arithmetic for numbers of ``dtype``."""
    if first.numel():
        wide = tl.float64 if dtype == torch.float64 else tl.float32
        grid, options = (-(-first.numel() // _BLOCK), 1, 1), {"num_warps": _NUM_WARPS, "enable_fp_fusion": False}
        launch(kernel, grid, first, *args, first.numel(), **constants, WIDE=wide, BLOCK=_BLOCK, **options)


@triton.jit
def load(pointers, inside, is_whole):
    """Returns the elements that are ``inside``, and zeros for the others; a tile that ``is_whole`` has no others."""
    if is_whole:  # noqa: SIM108
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, inside, 0)
    return values


@triton.jit
def store(pointers, values, inside, is_whole):
    """Writes the elements that are ``inside``, which are all if the tile ``is_whole``."""
    if is_whole:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, inside)


@triton.jit
def store_if(pointers, values, chosen, inside, is_whole):
    """Writes the elements that are ``chosen`` and ``inside``.

    The choice is the same for whole blocks, ``(TILE, 1, 1)``, so that by itself it leaves the accesses wide.
    """
    if is_whole:
        tl.store(pointers, values, chosen)
    else:
        tl.store(pointers, values, inside & chosen)


@triton.jit
def all_set(flags, num_flags):
    """Returns whether all of the flags, bools on the device, are true."""
    is_bad = tl.zeros((128,), tl.int32)
    for first in range(0, num_flags, 128):
        at = first + tl.arange(0, 128)
        is_bad |= tl.where(tl.load(flags + at, at < num_flags, 1) == 0, 1, 0)
    return tl.max(is_bad, 0) == 0


@triton.jit
def rounded_for(pointer, values):
    """Returns ``values`` in the dtype of ``pointer``. As in torch, float64 becomes 16 bits by way of float32."""
    if pointer.dtype.element_ty != tl.float64:
        values = values.to(tl.float32)
    return values.to(pointer.dtype.element_ty)


@triton.jit
def _elements(numel, BLOCK: tl.constexpr):
    """Returns the elements of this program, which of them exist, and whether all do."""
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
def _convert(out, values, numel, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    elements, inside, is_whole = _elements(numel, BLOCK)
    store(out + elements, rounded_for(out, load(values + elements, inside, is_whole)), inside, is_whole)


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


@triton.jit(do_not_specialize=["numel"])
def _find_bad(values, flags, numel, BLOCK: tl.constexpr):
    """Writes whether this program's block is finite."""
    elements, inside, is_whole = _elements(numel, BLOCK)
    block = load(values + elements, inside, is_whole)
    if block.dtype != tl.float64:
        block = block.to(tl.float32)
    is_good = tl.abs(block) < float("inf")
    tl.store(flags + tl.program_id(0), tl.min(is_good.to(tl.int32), 0) != 0)


@triton.jit(do_not_specialize=["num_flags"])
def _combine_flags(whole, flags, num_flags, BLOCK: tl.constexpr):
    """Writes whether all flags are set."""
    is_good = tl.full((BLOCK,), 1, tl.int8)
    for first in range(0, num_flags, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_good &= tl.load(flags + at, at < num_flags, 1).to(tl.int8)
    tl.store(whole, tl.min(is_good.to(tl.int32), 0) != 0)
