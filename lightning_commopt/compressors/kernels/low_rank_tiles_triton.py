"""Which parts of a bucket the programs of `low_rank_triton` work on, as tables on the device, and tiles of matrices.

A program holds one tile of one matrix in registers, whatever the rank of the factors, and goes through their columns.
Where the tiles are, it reads from a table that stays on the device, one row of integers for each.

Source: tiles as in Triton's tutorials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.matrices import Matrix, Parts

SUM_BLOCK = 64
"""Sums that one program adds up."""
REST_BLOCK = 2048
"""Elements that one program sends or receives as they are."""

# Rows and columns of a tile. Wide where a row is summed up, tall where a column is: few partial sums.
_ROWS_TILE = (32, 128)
_COLUMNS_TILE = (256, 32)
_TILE = (32, 128)


class Plan(NamedTuple):
    """What a kernel has to know of a bucket.

    Attributes:
        options: constants of the kernels, and Triton's options. Of them, all matrices and their rows begin at a
            multiple of ``ALIGNED`` elements, so that loads can be wide.
        tiles: ``(tiles, 9)`` int64, see `load_tile`.
        num_tiles: rows of ``tiles``.
        rest: ``(chunks, 3)`` int64, see `low_rank_triton`.
        num_chunks: rows of ``rest``.
        num_rest: elements of the rest.
        num_factors: elements of the message before the rest; 0 if the plan is not about a message.
        num_partials: elements that hold partial sums.
        sums: ``(sums, 5)`` int64, see `low_rank_triton`.
        num_sums: rows of ``sums``.
    """

    options: dict[str, Any]
    tiles: Tensor
    num_tiles: int
    rest: Tensor
    num_chunks: int
    num_rest: int
    num_factors: int
    num_partials: int = 0
    sums: Tensor | None = None
    num_sums: int = 0


# Tables are made once for each bucket layout, as only then the host waits for the device. They stay, as kernels of
# several streams read them.
@cache
def product_plan(parts: Parts, device: torch.device, by_rows: bool) -> Plan:
    """Returns the plan of a product; the partial sums of a matrix are ``(splits, r, m)`` or ``(splits, r, k)``."""
    matrices = parts.matrices
    tile = _ROWS_TILE if by_rows else _COLUMNS_TILE
    splits = [-(-matrix.k // tile[1]) if by_rows else -(-matrix.m // tile[0]) for matrix in matrices]
    p_starts, q_starts = _factor_starts(matrices)
    to_starts = p_starts if by_rows else q_starts
    sizes = [matrix.r * (matrix.m if by_rows else matrix.k) for matrix in matrices]
    partial_starts = list(accumulate((size * num for size, num in zip(sizes, splits, strict=True)), initial=0))
    tiles, sums = [], []
    for matrix, size, num, p_start, q_start, end, first in zip(
        matrices, sizes, splits, p_starts, q_starts, to_starts, partial_starts[:-1], strict=True
    ):
        for row, column in _corners(matrix, tile):
            split = column // tile[1] if by_rows else row // tile[0]
            tiles.append((*matrix, row, column, p_start, q_start, first + split * size))
        for offset in range(0, size, SUM_BLOCK):
            sums.append((first + offset, num, size, end + offset, size - offset))
    return _plan(parts, tile, tiles, sum(sizes), device)._replace(
        num_partials=partial_starts[-1], sums=_table(sums, device), num_sums=len(sums)
    )


@cache
def tiles_plan(parts: Parts, device: torch.device) -> Plan:
    """Returns the plan of what is done with every element."""
    matrices = parts.matrices
    tiles = [
        (*matrix, row, column, p_start, q_start, 0)
        for matrix, p_start, q_start in zip(matrices, *_factor_starts(matrices), strict=True)
        for row, column in _corners(matrix, _TILE)
    ]
    return _plan(parts, _TILE, tiles, 0, device)


def _plan(
    parts: Parts, tile: tuple[int, int], tiles: Sequence[tuple[int, ...]], num_factors: int, device: torch.device
) -> Plan:
    """Returns a plan; the rest is in the message behind the factors."""
    rest, place = [], num_factors
    for start, end in parts.rest:
        for first in range(start, end, REST_BLOCK):
            rest.append((first, place + first - start, min(REST_BLOCK, end - first)))
        place += end - start
    options = {"TILE_M": tile[0], "TILE_K": tile[1], "num_warps": tile[0] * tile[1] // 1024, "enable_fp_fusion": True}
    options["ALIGNED"] = gcd(4, *(number for matrix in parts.matrices for number in (matrix.start, matrix.k)))
    num_rest = place - num_factors
    return Plan(options, _table(tiles, device), len(tiles), _table(rest, device), len(rest), num_rest, num_factors)


def _factor_starts(matrices: tuple[Matrix, ...]) -> tuple[list[int], list[int]]:
    """Returns where ``P`` and ``Q`` of each matrix begin."""
    p_starts = list(accumulate((matrix.r * matrix.m for matrix in matrices), initial=0))[:-1]
    return p_starts, list(accumulate((matrix.r * matrix.k for matrix in matrices), initial=0))[:-1]


def _corners(matrix: Matrix, tile: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Returns the first row and column of every tile."""
    return product(range(0, matrix.m, tile[0]), range(0, matrix.k, tile[1]))


def _table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device)


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
