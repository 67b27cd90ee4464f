"""The operations of `low_rank` in Triton; what they do is defined there.

A program holds one tile of one matrix in registers, whatever the rank of the factors, and goes through their columns.
Sums over more than one tile are written apart and added up in a fixed order by a second kernel: no result depends on
which program comes first. Where the tiles are, the device reads from a table that stays on it, one row of integers for
each.

Multiplications and additions are fused, on every rank whatever its Triton does by default.

Source: tiles as in Triton's tutorials; the products are sums of float32 (float64) products, never TF32.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.cast_triton import rounded_for
from lightning_commopt.compressors.kernels.low_rank_tiles import SUM_BLOCK, product_plan, tiles_plan
from lightning_commopt.compressors.kernels.matrices import Matrix

_SUM_SPLITS = 16


def fold_and_multiply(
    gradient: Tensor,
    residual: Tensor,
    matrices: tuple[Matrix, ...],
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    """Sets ``residual += gradient - P Q^T`` of ``sent``, and multiplies that."""
    _multiply(gradient, (residual, *sent), matrices, p, q, by_rows)


def multiply(flat: Tensor, matrices: tuple[Matrix, ...], p: Tensor, q: Tensor, by_rows: bool) -> None:
    """Sets ``P = M Q`` if ``by_rows``, else ``Q = M^T P``."""
    _multiply(flat, None, matrices, p, q, by_rows)


def subtract_product(
    flat: Tensor, matrices: tuple[Matrix, ...], factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor
) -> None:
    """Sets ``out = M - P Q^T``, if ``finite``."""
    plan = tiles_plan(matrices, flat.device)
    with torch.cuda.device_of(flat):
        _subtract_product[(len(plan.tiles),)](
            plan.tiles, flat, out, *factors, finite, ALIGNED=plan.aligned, **_shape(plan.tile)
        )


def write_product(
    flat: Tensor,
    residual: Tensor | None,
    matrices: tuple[Matrix, ...],
    factors: tuple[Tensor, Tensor],
    finite: Tensor,
) -> None:
    """Sets ``M = P Q^T``; if not ``finite``, takes the gradients out of ``residual`` and sets ``M`` to NaN."""
    plan = tiles_plan(matrices, flat.device)
    folded = flat if residual is None else residual
    constants = {"HAS_RESIDUAL": residual is not None, "ALIGNED": plan.aligned}
    with torch.cuda.device_of(flat):
        _write_product[(len(plan.tiles),)](plan.tiles, flat, folded, *factors, finite, **constants, **_shape(plan.tile))


def _multiply(
    flat: Tensor,
    folded: tuple[Tensor, Tensor, Tensor] | None,
    matrices: tuple[Matrix, ...],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    factor, out = (q, p) if by_rows else (p, q)
    plan = product_plan(matrices, flat.device, by_rows)
    partials = flat.new_empty(plan.num_partials) if plan.num_partials else out
    constants = {"BY_ROWS": by_rows, "FOLD": folded is not None, "ALIGNED": plan.aligned, **_shape(plan.tile)}
    with torch.cuda.device_of(flat):
        _multiply_tile[(len(plan.tiles),)](
            plan.tiles, flat, *(folded or (flat, factor, factor)), factor, partials, **constants
        )
        if plan.num_partials:
            constants = {"SPLITS": _SUM_SPLITS, "BLOCK": SUM_BLOCK, "num_warps": 4, "enable_fp_fusion": True}
            _add_up[(len(plan.sums),)](plan.sums, partials, out, **constants)


def _shape(tile: tuple[int, int]) -> dict[str, int]:
    return {"TILE_M": tile[0], "TILE_K": tile[1], "num_warps": tile[0] * tile[1] // 1024, "enable_fp_fusion": True}


@triton.jit
def _load_tile(tiles, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Reads this program's row of the table.

    A row is: start, m, k and r of the matrix; first row and column of the tile; where the matrix's ``P`` and ``Q``
    begin, and this tile's share of a product. Factors are stored column by column.

    Returns:
        m, k and r; the rows ``(TILE_M,)`` and columns ``(TILE_K,)``; where their elements are in the bucket and which
        of them there are, both ``(TILE_M, TILE_K)``; the three places. Not as tuples within the tuple, which Triton
        3.2 does not compile.
    """
    tile = tiles + tl.program_id(0) * 9
    start = tl.multiple_of(tl.load(tile), ALIGNED)
    m = tl.load(tile + 1)
    k = tl.multiple_of(tl.load(tile + 2), ALIGNED)
    rows = tl.load(tile + 4) + tl.arange(0, TILE_M)
    columns = tl.multiple_of(tl.load(tile + 5), TILE_K) + tl.arange(0, TILE_K)
    elements = start + rows[:, None] * k + columns[None, :]
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    r, p, q, share = tl.load(tile + 3), tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
    return m, k, r, rows, columns, elements, inside, p, q, share


@triton.jit
def _product(factor_p, factor_q, m, k, r, rows, columns, zeros):
    """Returns this tile of ``P Q^T``; ``factor_p`` and ``factor_q`` point to the matrix's."""
    product = zeros
    for i in range(r):
        thin_p = tl.load(factor_p + i * m + rows, rows < m, 0)
        thin_q = tl.load(factor_q + i * k + columns, columns < k, 0)
        product += thin_p[:, None] * thin_q[None, :]
    return product


@triton.jit
def _multiply_tile(
    tiles,
    flat,
    residual,
    sent_p,
    sent_q,
    factor,
    partials,
    BY_ROWS: tl.constexpr,
    FOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Folds one tile into ``residual`` if asked to, and multiplies it with its part of ``Q`` (``BY_ROWS``) or ``P``."""
    m, k, r, rows, columns, elements, inside, p, q, out = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
    values = tl.load(flat + elements, inside, 0)
    if FOLD:
        gradients = values
        kept = tl.load(residual + elements, inside, 0)
        kept -= _product(sent_p + p, sent_q + q, m, k, r, rows, columns, tl.zeros_like(kept))
        values += kept
        tl.store(residual + elements, tl.where(tl.abs(gradients) < float("inf"), values, kept), inside)
    for i in range(r):
        if BY_ROWS:
            thin = tl.load(factor + q + i * k + columns, columns < k, 0)
            tl.store(partials + out + i * m + rows, tl.sum(values * thin[None, :], 1), rows < m)
        else:
            thin = tl.load(factor + p + i * m + rows, rows < m, 0)
            tl.store(partials + out + i * k + columns, tl.sum(values * thin[:, None], 0), columns < k)


@triton.jit
def _add_up(sums, partials, out, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up partial sums, always in the same order.

    A row of ``sums`` is: the first element in ``partials``, how many there are to add, the distance between them; where
    the sum goes in ``out``; how many sums there are from here on.
    """
    row = sums + tl.program_id(0) * 5
    begin, num, stride = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(row + 4)
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    for first in range(0, num, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = partials + begin + split[:, None] * stride + i[None, :]
        total += tl.sum(tl.load(at, (split < num)[:, None] & inside[None, :], 0), 0)
    tl.store(out + tl.load(row + 3) + i, total, inside)


@triton.jit
def _subtract_product(
    tiles, flat, out, factor_p, factor_q, finite, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """Subtracts from one tile."""
    if tl.load(finite) != 0:
        m, k, r, rows, columns, elements, inside, p, q, _ = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        rest = tl.load(flat + elements, inside, 0)
        rest -= _product(factor_p + p, factor_q + q, m, k, r, rows, columns, tl.zeros_like(rest))
        tl.store(out + elements, rounded_for(out, rest), inside)


@triton.jit
def _write_product(
    tiles,
    flat,
    residual,
    factor_p,
    factor_q,
    finite,
    HAS_RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Writes one tile."""
    m, k, r, rows, columns, elements, inside, p, q, _ = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
    mean = tl.zeros((TILE_M, TILE_K), flat.dtype.element_ty)
    if tl.load(finite) != 0:
        mean = _product(factor_p + p, factor_q + q, m, k, r, rows, columns, mean)
    else:
        if HAS_RESIDUAL:
            gradients = tl.load(flat + elements, inside, 0)
            folded = tl.load(residual + elements, inside, 0)
            folded -= tl.where(tl.abs(gradients) < float("inf"), gradients, 0)
            tl.store(residual + elements, tl.where(tl.abs(folded) < float("inf"), folded, 0), inside)
        mean += float("nan")
    tl.store(flat + elements, mean, inside)
