"""Which tiles of a bucket's matrices the programs of `low_rank_triton` work on, as tables on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels.matrices import Matrix

SUM_BLOCK = 64
"""Sums that one program adds up."""

# Rows and columns of a tile. Wide where a row is summed up, tall where a column is: few partial sums.
_ROWS_TILE = (32, 128)
_COLUMNS_TILE = (256, 32)
_TILE = (32, 128)


class Plan(NamedTuple):
    """What a kernel has to know of a bucket.

    Attributes:
        tile: rows and columns of a tile.
        tiles: ``(tiles, 9)`` int64, see `low_rank_triton`.
        aligned: elements of which all matrices and their rows begin at a multiple, so that loads can be wide.
        num_partials: elements that hold partial sums; 0 if every sum is within a tile.
        sums: ``(sums, 5)`` int64, see `low_rank_triton`.
    """

    tile: tuple[int, int]
    tiles: Tensor
    aligned: int
    num_partials: int
    sums: Tensor


# Tables are made once for each bucket layout, as only then the host waits for the device. They stay, as kernels of
# several streams read them.
@cache
def product_plan(matrices: tuple[Matrix, ...], device: torch.device, by_rows: bool) -> Plan:
    """Returns the plan of a product; the partial sums of a matrix are ``(splits, r, m)`` or ``(splits, r, k)``."""
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
    num_partials = partial_starts[-1] if max(splits) > 1 else 0
    return Plan(tile, _table(tiles, device), _alignment(matrices), num_partials, _table(sums, device))


@cache
def tiles_plan(matrices: tuple[Matrix, ...], device: torch.device) -> Plan:
    """Returns the plan of what is done with every element."""
    tiles = [
        (*matrix, row, column, p_start, q_start, 0)
        for matrix, p_start, q_start in zip(matrices, *_factor_starts(matrices), strict=True)
        for row, column in _corners(matrix, _TILE)
    ]
    return Plan(_TILE, _table(tiles, device), _alignment(matrices), 0, _table([], device))


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
