"""Tiles of a bucket's matrices in Triton, and the one operation of `low_rank` that is needed by itself on CUDA.

A program holds one tile of one matrix in registers, whatever the rank of the factors, and goes through their columns.
Where the tiles are, the device reads from a table that stays on it, one row of integers for each.

Multiplications and additions are fused, on every rank whatever its Triton does by default.

Source: tiles as in Triton's tutorials; the products are sums of float32 (float64) products, never TF32.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.cast_triton import rounded_for
from lightning_commopt.compressors.kernels.finite_triton import all_set
from lightning_commopt.compressors.kernels.launch_triton import launch
from lightning_commopt.compressors.kernels.low_rank_tiles import tiles_plan
from lightning_commopt.compressors.kernels.matrices import Matrix, Parts


def subtract_product(
    flat: Tensor, matrices: tuple[Matrix, ...], factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor
) -> None:
    """Sets ``out = M - P Q^T``, if ``finite``."""
    plan = tiles_plan(_parts_of(matrices), flat.device)
    args = (plan.tiles, flat, out, *factors, finite, finite.numel())
    launch(_subtract_product, (plan.num_tiles, 1, 1), *args, **plan.options)


@cache
def _parts_of(matrices: tuple[Matrix, ...]) -> Parts:
    return Parts(matrices)


@triton.jit
def load_tile(tiles, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
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
def product_tile(factor_p, factor_q, m, k, r, rows, columns, zeros):
    """Returns this tile of ``P Q^T``; ``factor_p`` and ``factor_q`` point to the matrix's."""
    product = zeros
    for i in range(r):
        thin_p = tl.load(factor_p + i * m + rows, rows < m, 0)
        thin_q = tl.load(factor_q + i * k + columns, columns < k, 0)
        product += thin_p[:, None] * thin_q[None, :]
    return product


@triton.jit(do_not_specialize=["num_flags"])
def _subtract_product(
    tiles,
    flat,
    out,
    factor_p,
    factor_q,
    finite,
    num_flags,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Subtracts from one tile."""
    if all_set(finite, num_flags):
        m, k, r, rows, columns, elements, inside, p, q, _ = load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        rest = tl.load(flat + elements, inside, 0)
        rest -= product_tile(factor_p + p, factor_q + q, m, k, r, rows, columns, tl.zeros_like(rest))
        tl.store(out + elements, rounded_for(out, rest), inside)
