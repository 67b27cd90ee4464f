"""The operations of `low_rank` in Triton; what they do is defined there.

A program holds one tile of one matrix in registers, whatever the rank of the factors, and goes through their rows. Sums
over more than one tile are written apart and added up in a fixed order by a second kernel: no result depends on which
program comes first. Where the tiles are, the device reads from a table that stays on it, one row of integers for each.

Source: tiles as in Triton's tutorials; the products are sums of float32 (float64) products, never TF32.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.kernels.cast_triton import rounded_for
from lightning_commopt.kernels.low_rank import Matrix

# Rows and columns of a tile. Wide where a row is summed up, tall where a column is: few partial sums.
_ROWS_TILE = (32, 128)
_COLUMNS_TILE = (256, 32)
_TILE = (32, 128)
_SUM_SPLITS, _SUM_BLOCK = 16, 64


def fold_rows(
    gradient: Tensor,
    residual: Tensor,
    matrices: tuple[Matrix, ...],
    sent: tuple[Tensor, Tensor],
    q: Tensor,
    p: Tensor,
) -> None:
    """Sets ``residual += gradient - P.T @ Q`` of ``sent``, then ``P = Q @ residual.T``."""
    _multiply(gradient, (residual, *sent), _rows_plan(matrices, gradient.device), q, p, _ROWS_TILE, BY_ROWS=True)


def fold_columns(
    gradient: Tensor,
    residual: Tensor,
    matrices: tuple[Matrix, ...],
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
) -> None:
    """Sets ``residual += gradient - P.T @ Q`` of ``sent``, then ``Q = P @ residual``."""
    _multiply(gradient, (residual, *sent), _columns_plan(matrices, gradient.device), p, q, _COLUMNS_TILE, BY_ROWS=False)


def multiply_rows(flat: Tensor, matrices: tuple[Matrix, ...], q: Tensor, p: Tensor) -> None:
    """Sets ``P = Q @ M.T``."""
    _multiply(flat, None, _rows_plan(matrices, flat.device), q, p, _ROWS_TILE, BY_ROWS=True)


def multiply_columns(flat: Tensor, matrices: tuple[Matrix, ...], p: Tensor, q: Tensor) -> None:
    """Sets ``Q = P @ M``."""
    _multiply(flat, None, _columns_plan(matrices, flat.device), p, q, _COLUMNS_TILE, BY_ROWS=False)


def subtract_product(
    flat: Tensor, matrices: tuple[Matrix, ...], factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor
) -> None:
    """Sets ``out = M - P.T @ Q``, if ``finite``."""
    plan = _tiles_plan(matrices, flat.device)
    with torch.cuda.device_of(flat):
        _subtract_product[(len(plan.tiles),)](
            plan.tiles, flat, out, *factors, finite, ALIGNED=plan.aligned, **_shape(_TILE)
        )


def write_product(
    flat: Tensor,
    residual: Tensor | None,
    matrices: tuple[Matrix, ...],
    factors: tuple[Tensor, Tensor],
    finite: Tensor,
) -> None:
    """Sets ``M = P.T @ Q``; if not ``finite``, takes the gradients out of ``residual`` and sets ``M`` to NaN."""
    plan = _tiles_plan(matrices, flat.device)
    folded = flat if residual is None else residual
    constants = {"HAS_RESIDUAL": residual is not None, "ALIGNED": plan.aligned}
    with torch.cuda.device_of(flat):
        _write_product[(len(plan.tiles),)](plan.tiles, flat, folded, *factors, finite, **constants, **_shape(_TILE))


class _Plan(NamedTuple):
    """What a kernel has to know of a bucket.

    Attributes:
        tiles: ``(tiles, 9)`` int64, see `_load_tile`.
        aligned: elements of which all matrices and their rows begin at a multiple, so that loads can be wide.
        num_partials: elements that hold partial sums; 0 if every sum is within a tile.
        sums: ``(sums, 5)`` int64, see `_add_up`.
    """

    tiles: Tensor
    aligned: int
    num_partials: int
    sums: Tensor


def _multiply(
    flat: Tensor,
    fold: tuple[Tensor, Tensor, Tensor] | None,
    plan: _Plan,
    factor: Tensor,
    out: Tensor,
    tile: tuple[int, int],
    BY_ROWS: bool,
) -> None:
    partials = flat.new_empty(plan.num_partials) if plan.num_partials else out
    folded = (flat, factor, factor) if fold is None else fold
    constants = {"BY_ROWS": BY_ROWS, "FOLD": fold is not None, "ALIGNED": plan.aligned}
    with torch.cuda.device_of(flat):
        _multiply_tile[(len(plan.tiles),)](plan.tiles, flat, *folded, factor, partials, **constants, **_shape(tile))
        if plan.num_partials:
            _add_up[(len(plan.sums),)](plan.sums, partials, out, SPLITS=_SUM_SPLITS, BLOCK=_SUM_BLOCK, num_warps=4)


def _shape(tile: tuple[int, int]) -> dict[str, int]:
    return {"TILE_M": tile[0], "TILE_K": tile[1], "num_warps": tile[0] * tile[1] // 1024}


# Tables are made once for each bucket layout. Only then the host waits for the device.
@lru_cache(maxsize=1024)
def _rows_plan(matrices: tuple[Matrix, ...], device: torch.device) -> _Plan:
    splits = [-(-matrix.k // _ROWS_TILE[1]) for matrix in matrices]
    return _product_plan(matrices, device, _ROWS_TILE, splits, BY_ROWS=True)


@lru_cache(maxsize=1024)
def _columns_plan(matrices: tuple[Matrix, ...], device: torch.device) -> _Plan:
    splits = [-(-matrix.m // _COLUMNS_TILE[0]) for matrix in matrices]
    return _product_plan(matrices, device, _COLUMNS_TILE, splits, BY_ROWS=False)


def _product_plan(
    matrices: tuple[Matrix, ...], device: torch.device, tile: tuple[int, int], splits: list[int], BY_ROWS: bool
) -> _Plan:
    """Returns the plan of a product; the partial sums of a matrix are ``(splits, r, m)`` or ``(splits, r, k)``."""
    p_starts, q_starts = _factor_starts(matrices)
    to_starts = p_starts if BY_ROWS else q_starts
    sizes = [matrix.r * (matrix.m if BY_ROWS else matrix.k) for matrix in matrices]
    partial_starts = list(accumulate((size * num for size, num in zip(sizes, splits, strict=True)), initial=0))
    tiles, sums = [], []
    for matrix, size, num, p_start, q_start, end, first in zip(
        matrices, sizes, splits, p_starts, q_starts, to_starts, partial_starts[:-1], strict=True
    ):
        for row, column in _corners(matrix, tile):
            split = column // tile[1] if BY_ROWS else row // tile[0]
            tiles.append((*matrix, row, column, p_start, q_start, first + split * size))
        for offset in range(0, size, _SUM_BLOCK):
            sums.append((first + offset, num, size, end + offset, size - offset))
    num_partials = partial_starts[-1] if max(splits) > 1 else 0
    return _Plan(_table(tiles, device), _alignment(matrices), num_partials, _table(sums, device))


@lru_cache(maxsize=1024)
def _tiles_plan(matrices: tuple[Matrix, ...], device: torch.device) -> _Plan:
    tiles = [
        (*matrix, row, column, p_start, q_start, 0)
        for matrix, p_start, q_start in zip(matrices, *_factor_starts(matrices), strict=True)
        for row, column in _corners(matrix, _TILE)
    ]
    return _Plan(_table(tiles, device), _alignment(matrices), 0, _table([], device))


def _factor_starts(matrices: tuple[Matrix, ...]) -> tuple[list[int], list[int]]:
    """Returns where ``P`` and ``Q`` of each matrix begin."""
    p_starts = list(accumulate((matrix.r * matrix.m for matrix in matrices), initial=0))[:-1]
    return p_starts, list(accumulate((matrix.r * matrix.k for matrix in matrices), initial=0))[:-1]


def _corners(matrix: Matrix, tile: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Returns the first row and column of every tile."""
    return product(range(0, matrix.m, tile[0]), range(0, matrix.k, tile[1]))


def _alignment(matrices: tuple[Matrix, ...]) -> int:
    return gcd(4, *(number for matrix in matrices for number in (matrix.start, matrix.k)))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device)


@triton.jit
def _load_tile(tiles, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Returns what this program's row in the table says.

    A row is: start, m, k and r of the matrix; first row and column of the tile; where the matrix's ``P`` and ``Q``
    begin, and this tile's share of a product.

    Returns:
        m, k and r; the rows ``(TILE_M,)`` and columns ``(TILE_K,)``; where their elements are in the bucket and which
        of them there are, both ``(TILE_M, TILE_K)``; the three places.
    """
    tile = tiles + tl.program_id(0) * 9
    start = tl.multiple_of(tl.load(tile), ALIGNED)
    m = tl.load(tile + 1)
    k = tl.multiple_of(tl.load(tile + 2), ALIGNED)
    rows = tl.load(tile + 4) + tl.arange(0, TILE_M)
    columns = tl.multiple_of(tl.load(tile + 5), TILE_K) + tl.arange(0, TILE_K)
    elements = start + rows[:, None] * k + columns[None, :]
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    places = tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
    return m, k, tl.load(tile + 3), rows, columns, elements, inside, places


@triton.jit
def _product(factor_p, factor_q, m, k, r, rows, columns, zeros):
    """Returns this tile of ``P.T @ Q``; ``factor_p`` and ``factor_q`` point to the matrix's."""
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
    m, k, r, rows, columns, elements, inside, places = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
    p, q, out = places
    values = tl.load(flat + elements, inside, 0)
    if FOLD:
        gradients = values
        owed = tl.load(residual + elements, inside, 0)
        owed -= _product(sent_p + p, sent_q + q, m, k, r, rows, columns, tl.zeros_like(owed))
        values += owed
        tl.store(residual + elements, tl.where(tl.abs(gradients) < float("inf"), values, owed), inside)
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
        m, k, r, rows, columns, elements, inside, places = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        p, q, _ = places
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
    m, k, r, rows, columns, elements, inside, places = _load_tile(tiles, ALIGNED, TILE_M, TILE_K)
    p, q, _ = places
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
