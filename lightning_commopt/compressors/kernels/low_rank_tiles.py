"""Which parts of a bucket the programs of `low_rank_rounds_triton` work on, as tables on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import gcd
from typing import Any, NamedTuple

import torch
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
        tiles: ``(tiles, 9)`` int64, see `low_rank_triton`.
        num_tiles: rows of ``tiles``.
        rest: ``(chunks, 3)`` int64, see `low_rank_rounds_triton`.
        num_chunks: rows of ``rest``.
        num_rest: elements of the rest.
        num_factors: elements of the message before the rest; 0 if the plan is not about a message.
        num_partials: elements that hold partial sums.
        sums: ``(sums, 5)`` int64, see `low_rank_rounds_triton`.
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
