"""Tables on the device of what the programs of `low_rank_triton` work on, and tiles of matrices.

A program holds one tile of one matrix in registers, whatever the rank of the factors, and iterates over their columns.
It reads the place of its tile from a table that stays on the device, with one row of integers for each tile.

Source: tiles as in Triton's tutorials.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.factors import Parts

SUM_BLOCK = 64
"""Sums that one program makes. Factors are small, so more for each program would leave most of the device idle."""
REST_BLOCK = 2048
"""Elements that one program copies uncompressed: half of a tile by rows, since most of the rest is short vectors."""

_MAX_UNROLLED, _WIDE = 4, 4
"""Columns of the factors up to which loops over them are unrolled, so that all of a tile's loads are under way at once;
and elements of an access, at a multiple of which rows must begin for that. Otherwise unrolling takes too many
registers."""

# Rows, columns and warps of a tile, by whether rows are summed up, columns, or neither. They were chosen on an H200
# with 4 columns of factors, from `benchmarks/kernel_tiles.py`: of the tiles that spill no registers each is the
# fastest, or takes at most a tenth longer. The first ones are for loops that are unrolled. With them Triton keeps a
# tile in one layout, whereas others, such as 32 x 128, pass through shared memory.
_TILES = {
    True: {True: (64, 64, 8), False: (128, 64, 4), None: (64, 64, 4)},
    False: {True: (16, 128, 2), False: (128, 32, 4), None: (128, 32, 4)},
}


class Plan(NamedTuple):
    """What a kernel has to know about a bucket."""

    # Constants of the kernels and Triton's options. All matrices and their rows begin at a multiple of ``ALIGNED``
    # elements, so that loads can be wide.
    options: dict[str, Any]
    tiles: Tensor  # ``(tiles, 9)`` int64, see `load_tile`
    rest: Tensor  # ``(chunks, 3)`` int64, see `low_rank_triton`
    sums: Tensor  # ``(sums, 5)`` int64, see `low_rank_triton`
    num_tiles: int
    num_chunks: int
    num_sums: int
    num_rest: int  # number of elements of the rest
    num_factors: int  # number of elements of the message before the rest; 0 if the plan is not for a message
    num_partials: int  # number of partial sums


# The host waits for the device when it makes a table, so it makes one only once for each bucket layout. Tables are
# never freed, because kernels on several streams read them.
@cache
def plan_for(parts: Parts, device: torch.device, by_rows: bool | None = None) -> Plan:
    """Returns the plan of a product, ``P`` if ``by_rows``, else ``Q``; None for an operation on every element.

    The partial sums of a matrix are ``(splits, r, m)`` or ``(splits, r, k)``; with None there are none.
    """
    num_columns = max((matrix.r for matrix in parts.matrices), default=0)
    aligned = gcd(_WIDE, *(number for matrix in parts.matrices for number in (matrix.start, matrix.k)))
    is_unrolled = num_columns <= _MAX_UNROLLED and aligned == _WIDE
    tile_m, tile_k, num_warps = _TILES[is_unrolled][by_rows]
    tiles, sums = [], []
    p_start = q_start = num_partials = 0
    for matrix in parts.matrices:
        _, m, k, r = matrix
        num_p, num_q = r * m, r * k
        start, size, splits = (p_start, num_p, -(-k // tile_k)) if by_rows else (q_start, num_q, -(-m // tile_m))
        for row, column in product(range(0, m, tile_m), range(0, k, tile_k)):
            split = column // tile_k if by_rows else row // tile_m
            tiles.append((*matrix, row, column, p_start, q_start, num_partials + split * size))
        for offset in range(0, size, SUM_BLOCK):
            sums.append((num_partials + offset, splits, size, start + offset, size - offset))
        p_start, q_start, num_partials = p_start + num_p, q_start + num_q, num_partials + splits * size
    num_factors = 0 if by_rows is None else p_start if by_rows else q_start
    rest, place = [], num_factors
    for start, end in parts.rest:
        for first in range(start, end, REST_BLOCK):
            rest.append((first, place + first - start, min(REST_BLOCK, end - first)))
        place += end - start
    options = {"TILE_M": tile_m, "TILE_K": tile_k, "num_warps": num_warps, "enable_fp_fusion": True}
    options["COLUMNS"] = num_columns if is_unrolled else 0
    options["ALIGNED"] = aligned
    tile_table, rest_table, sum_table = (
        torch.tensor(rows, dtype=torch.int64, device="cpu").to(device) for rows in (tiles, rest, sums)
    )
    counts, num_rest = (len(tiles), len(rest), len(sums)), place - num_factors
    return Plan(options, tile_table, rest_table, sum_table, *counts, num_rest, num_factors, num_partials)


@triton.jit
def load_tile(tiles, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Reads this program's row of the table.

    A row has: start, m, k and r of the matrix; the first row and column of the tile; the first elements of the matrix's
    ``P`` and ``Q``, and of this tile's share of a product. Factors are stored column by column.

    Returns:
        m, k and r; the rows ``(TILE_M,)`` and columns ``(TILE_K,)``; the places of their elements in the bucket and
        which of them exist, both ``(TILE_M, TILE_K)``; and the last three elements of the table's row. The result is
        flat because Triton 3.2 does not compile nested tuples.
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
def thin(pointer, i, r, side, at):
    """Returns the elements ``at`` of column ``i`` of a factor with ``r`` columns, of which each has ``side`` elements.

    They are zeros for a column that the factor does not have.
    """
    return tl.load(pointer + i * side + at, at < tl.where(i < r, side, 0), 0)


@triton.jit
def product_tile(factor_p, factor_q, m, k, r, rows, columns, zeros, COLUMNS: tl.constexpr):
    """Returns this tile of ``P Q^T``; ``factor_p`` and ``factor_q`` point to the factors of the matrix.

    ``COLUMNS`` is at least ``r``, or 0 for a loop that is not unrolled.
    """
    product = zeros
    if COLUMNS > 0:
        for i in tl.static_range(COLUMNS):
            product += thin(factor_p, i, r, m, rows)[:, None] * thin(factor_q, i, r, k, columns)[None, :]
    else:
        for i in range(r):
            product += thin(factor_p, i, r, m, rows)[:, None] * thin(factor_q, i, r, k, columns)[None, :]
    return product
