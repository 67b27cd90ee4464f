"""The operation of `orthonormal` in Triton, for all factors of a bucket at once; what it does is defined there.

Gram-Schmidt by the scalar products of all rows alone, in float64: one kernel computes these products tile by tile, one
finds for every factor the combinations of rows that are orthonormal, and one applies them. The squares of float32
numbers neither overflow in float64 nor lose digits, so that rows are orthonormal to 1e-5 even if only 2**-16 of their
norm was left, the least that is not replaced, and to float32's precision if it was 2**-12.

Multiplications and additions are fused, on every rank whatever its Triton does by default.

Candidates ``C`` ``(2 R, side)`` for the basis are the rows of ``X``, from row 0 on, and the old rows, from row ``R``
on, where ``R`` is a power of two that is not below ``r``; what lies between is zero.
"""

# Triton's compiler reads annotations, and wants its constants in capitals.
# ruff: noqa: ANN001, ANN202, N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.matrices import Shapes

# Of the square of a row's norm: of what is left beneath this the products have too few digits.
_TOLERANCE = tl.constexpr(2.0**-32)
_TILE_NUMEL, _LONGEST_TILE = 8192, 1024
_SUM_NUMEL, _MAX_SPLITS = 4096, 32
_MAX_ROWS = 32


def orthonormalize(x: Tensor, shapes: Shapes, old: Tensor | None, epsilon: float, finite: Tensor) -> Tensor:
    """Returns orthonormal rows, ``old`` ones if not ``finite``; of float32 factors without very many rows."""
    if x.dtype != torch.float32 or max(r for r, _ in shapes) > _MAX_ROWS:
        return NotImplemented
    plan = _plan_for(shapes, old is not None, x.device)
    partials = x.new_empty(plan.num_partials, dtype=torch.float64)
    transforms = x.new_empty(len(shapes) * plan.R * plan.NUM, dtype=torch.float64)
    basis = torch.empty_like(x)
    candidates = (x, x if old is None else old)
    sizes = {"R": plan.R, "NUM": plan.NUM, "enable_fp_fusion": True}
    shrink = {"SINGLE_NORM": 1 / (1 + epsilon)}
    with torch.cuda.device_of(x):
        _multiply_candidates[(len(plan.tiles),)](
            plan.tiles, *candidates, partials, **sizes, BLOCK=plan.BLOCK, num_warps=8
        )
        splits = max(1, min(_MAX_SPLITS, _SUM_NUMEL // plan.NUM**2))
        warps = 1 if plan.NUM <= 8 else 8
        _combine[(len(shapes),)](plan.factors, partials, transforms, **sizes, **shrink, SPLITS=splits, num_warps=warps)
        _apply[(len(plan.tiles),)](
            plan.tiles, *candidates, transforms, finite, basis, **sizes, BLOCK=plan.BLOCK, num_warps=4
        )
    return basis


class _Plan(NamedTuple):
    """What the kernels have to know of the factors of a bucket.

    Attributes:
        tiles: ``(tiles, 6)`` int64: where the factor begins, its side and r, the first column of the tile, where its
            partial sums begin, where the factor's transform begins.
        factors: ``(factors, 4)`` int64: where the partial sums begin, how many tiles there are, r, where the transform
            begins.
        num_partials: elements that hold partial sums, ``(tiles, NUM, NUM)``.
        R: a power of two, not below any ``r``.
        NUM: candidates; ``R`` if there are no old rows, else ``2 R``.
        BLOCK: columns of a tile.
    """

    tiles: Tensor
    factors: Tensor
    num_partials: int
    R: int
    NUM: int
    BLOCK: int


# Tables are made once for each bucket layout, as only then the host waits for the device. They stay, as kernels of
# several streams read them.
@cache
def _plan_for(shapes: Shapes, has_old: bool, device: torch.device) -> _Plan:
    most = max(2, triton.next_power_of_2(max(r for r, _ in shapes)))
    num = 2 * most if has_old else most
    block = min(_LONGEST_TILE, _TILE_NUMEL // num)
    tiles: list[tuple[int, ...]] = []
    factors = []
    starts = accumulate((r * side for r, side in shapes), initial=0)
    for index, ((r, side), start) in enumerate(zip(shapes, starts, strict=False)):
        columns = range(0, side, block)
        transform = index * most * num
        factors.append((len(tiles) * num**2, len(columns), r, transform))
        tiles += [(start, side, r, column, (len(tiles) + i) * num**2, transform) for i, column in enumerate(columns)]
    tile_table, factor_table = (torch.tensor(rows).to(device) for rows in (tiles, factors))
    return _Plan(tile_table, factor_table, len(tiles) * num**2, most, num, block)


@triton.jit
def _multiply_candidates(tiles, x, old, partials, R: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes this tile's share of ``C @ C.T``, ``(NUM, NUM)``, but for rows and columns of zeros."""
    tile = tiles + tl.program_id(0) * 6
    start, side, r = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    columns = tl.load(tile + 3) + tl.arange(0, BLOCK)
    inside = columns < side
    c = tl.arange(0, NUM)
    at = start + (c % R)[:, None] * side + columns[None, :]
    there = (c % R < r)[:, None] & inside[None, :]
    candidates = tl.load(x + at, there & (c < R)[:, None], 0)
    if NUM > R:
        candidates += tl.load(old + at, there & (c >= R)[:, None], 0)
    candidates = candidates.to(tl.float64)
    out = partials + tl.load(tile + 4) + c
    for i in range(r):
        row = tl.load(x + start + i * side + columns, inside, 0).to(tl.float64)
        tl.store(out + i * NUM, tl.sum(candidates * row[None, :], 1))
        if NUM > R:
            row = tl.load(old + start + i * side + columns, inside, 0).to(tl.float64)
            tl.store(out + (R + i) * NUM, tl.sum(candidates * row[None, :], 1))


@triton.jit
def _combine(
    factors,
    partials,
    transforms,
    R: tl.constexpr,
    NUM: tl.constexpr,
    SINGLE_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Finds the combinations ``T`` ``(r, NUM)`` of the candidates of one factor whose rows are orthonormal.

    Gram-Schmidt, twice for each row, in the scalar product ``G = C @ C.T``. Of every candidate it keeps the square of
    what the rows so far leave of it.
    """
    factor = factors + tl.program_id(0) * 4
    begin, num_tiles, r = tl.load(factor), tl.load(factor + 1), tl.load(factor + 2)
    flat = tl.arange(0, NUM * NUM)
    there = ((flat // NUM) % R < r) & (flat % R < r)
    total = tl.zeros((NUM * NUM,), tl.float64)
    for first in range(0, num_tiles, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = partials + begin + split[:, None] * (NUM * NUM) + flat[None, :]
        total += tl.sum(tl.load(at, (split < num_tiles)[:, None] & there[None, :], 0), 0)
    gram = tl.reshape(total, (NUM, NUM))

    c = tl.arange(0, NUM)
    squares = tl.sum(tl.where(c[:, None] == c[None, :], gram, 0.0), 1)
    left = squares
    basis = tl.zeros((R, NUM), tl.float64)
    for i in range(r):
        is_left = left > squares * _TOLERANCE
        is_pick = (c == i) & is_left
        if NUM > R:
            spare = tl.where((c >= R) & is_left, left, 0.0)
            is_best = (spare == tl.max(spare, 0)) & (c >= R) & is_left
            best = tl.min(tl.where(is_best, c, NUM), 0)
            is_pick = tl.where(tl.sum(is_pick.to(tl.int32), 0) > 0, c == i, c == best)
        row = tl.where(is_pick, 1.0, 0.0).to(tl.float64)
        for _ in range(2):
            products = tl.sum(gram * row[None, :], 1)
            along = tl.sum(basis * products[None, :], 1)
            row -= tl.sum(basis * along[:, None], 0)
        products = tl.sum(gram * row[None, :], 1)
        square = tl.sum(row * products, 0)
        inverse = tl.where(square > 0, 1 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
        row *= inverse
        products *= inverse
        left -= products * products
        basis = tl.where((tl.arange(0, R) == i)[:, None], row[None, :], basis)
        if r == 1:
            row *= SINGLE_NORM
        tl.store(transforms + tl.load(factor + 3) + i * NUM + c, row)


@triton.jit
def _apply(tiles, x, old, transforms, finite, basis, R: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes one tile of ``T @ C``, or of the old rows if the step was not ``finite``."""
    tile = tiles + tl.program_id(0) * 6
    start, side, r = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    columns = tl.load(tile + 3) + tl.arange(0, BLOCK)
    inside = columns < side
    transform = transforms + tl.load(tile + 5)
    is_finite = tl.load(finite) != 0
    for i in range(r):
        total = tl.zeros((BLOCK,), tl.float64)
        if is_finite:
            for j in range(r):
                row = start + j * side + columns
                total += tl.load(transform + i * NUM + j) * tl.load(x + row, inside, 0).to(tl.float64)
                if NUM > R:
                    weight = tl.load(transform + i * NUM + R + j)
                    total += weight * tl.load(old + row, inside, 0).to(tl.float64)
        elif NUM > R:
            total += tl.load(old + start + i * side + columns, inside, 0).to(tl.float64)
        tl.store(basis + start + i * side + columns, total.to(tl.float32), inside)
