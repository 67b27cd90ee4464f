"""The operation of `factors` in Triton, for all factors of a bucket at once; `factors` defines what it does.

Gram-Schmidt needs only the scalar products of all rows, here in float64: one kernel computes these products tile by
tile, and another finds the orthonormal combinations of rows for every factor and applies them. If there are few rows,
each program finds the combinations itself, which saves a launch. The first kernel also looks for numbers that are not
finite: its first programs have a tile of a factor each, the others a chunk of the rest. The squares of float32 numbers
neither overflow in float64 nor lose digits. Therefore rows are orthonormal to 1e-5 even if only 2**-16 of their norm
was left, below which they are replaced, and to float32's precision if 2**-12 was left.

Multiplications and additions are fused on every rank, whatever its version of Triton does by default.

Candidates ``C`` ``(2 R, side)`` for the basis are the rows of ``X`` from row 0 on, and the old rows from row ``R`` on,
where ``R`` is a power of two of at least ``r``; the rows between are zero.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.elementwise_triton import all_set
from lightning_commopt.compressors.kernels.factors import Shapes
from lightning_commopt.compressors.kernels.launch_triton import launch

# A row is replaced if less than this share of its squared norm is left, since the products then have too few digits.
_TOLERANCE = tl.constexpr(2.0**-32)
# A tile has at most this many elements and columns. The candidates of a tile are held in float64, so that a thread of 8
# warps has 32 of them at most; longer tiles of few candidates would leave too few programs for small factors.
_TILE_NUMEL, _LONGEST_TILE = 8192, 1024
_REST_BLOCK = 8192  # elements that a program only checks, as many as a tile has
# A program adds up at most this many partial products at once, of at most this many tiles: 16 numbers for each thread.
_SUM_NUMEL, _MAX_SPLITS = 4096, 32
# With 64 rows and as many old ones the products in float64 would take 128 KiB, half of a processor's registers.
_MAX_ROWS = 32
_MAX_COMBINED = 16  # up to so many candidates every program finds the combinations itself, which saves a launch


def orthonormalize(
    message: Tensor, shapes: Shapes, old: Tensor | None, epsilon: float, before: Tensor | None = None
) -> object:
    """Returns orthonormal rows and flags, for float32 factors of up to `_MAX_ROWS` rows."""
    if message.dtype != torch.float32 or max(r for r, _ in shapes) > _MAX_ROWS:
        return NotImplemented
    plan = _plan_for(shapes, old is not None, message.device)
    num_flags = plan.num_tiles - (plan.num_factors - message.numel()) // _REST_BLOCK
    flags = message.new_empty(num_flags, dtype=torch.bool)
    sums = message.new_empty(plan.num_sums, dtype=torch.float64)
    basis = message.new_empty(plan.num_factors)
    candidates = (message, message if old is None else old)
    earlier = (flags, 0) if before is None else (before, before.numel())
    combining = {"SINGLE_NORM": 1 / (1 + epsilon), "SPLITS": plan.num_splits}

    args = (plan.tiles, *candidates, sums, flags, *earlier, plan.num_tiles, plan.num_factors, message.numel())
    blocks = {"BLOCK": plan.block, "REST_BLOCK": _REST_BLOCK, "num_warps": 8}
    launch(_multiply_candidates, (num_flags, 1, 1), *args, **plan.options, **blocks)
    if not plan.combines:
        grid = (len(shapes), 1, 1)
        launch(_combine, grid, plan.factors, sums, sums, **plan.options, **combining, num_warps=8)
    applied = (plan.tiles, *candidates, sums, flags, basis, num_flags)
    blocks = {"BLOCK": plan.block, "COMBINES": plan.combines, "num_warps": 4}
    launch(_apply, (plan.num_tiles, 1, 1), *applied, **plan.options, **combining, **blocks)
    return basis, flags


class _Plan(NamedTuple):
    """What the kernels have to know about the factors of a bucket.

    A row of ``tiles`` ``(tiles, 8)``, int64, has: the first partial sum of the factor, its number of tiles, ``r``, the
    first element of the transform that the tile needs; the first element of the factor, its side, the first column of
    the tile, and the tile's first partial sum. A row of ``factors`` ``(factors, 4)`` has the first four of these.
    """

    tiles: Tensor
    factors: Tensor
    num_tiles: int
    num_factors: int  # number of elements of all factors
    num_sums: int  # number of elements of all partial sums, ``(tiles, NUM, NUM)``, and of the transforms behind them
    # Constants of all kernels: ``R``, a power of two of at least every ``r``; ``NUM``, the number of candidates, ``R``
    # without old rows and ``2 R`` with them; and Triton's own options.
    options: dict[str, int | bool]
    block: int  # number of columns of a tile
    num_splits: int  # number of tiles whose partial sums are added up at once
    combines: bool  # whether every program finds the combinations itself, so that each tile has a transform


# The host waits for the device when it makes a table, so it makes one only once for each bucket layout. Tables are
# never freed, because kernels on several streams read them.
@cache
def _plan_for(shapes: Shapes, has_old: bool, device: torch.device) -> _Plan:
    most = max(2, triton.next_power_of_2(max(r for r, _ in shapes)))
    num = 2 * most if has_old else most
    block, combines = min(_LONGEST_TILE, _TILE_NUMEL // num), num <= _MAX_COMBINED
    num_tiles = sum(-(-side // block) for _, side in shapes)
    tiles: list[tuple[int, ...]] = []
    factors = []
    starts = list(accumulate((r * side for r, side in shapes), initial=0))
    for index, ((r, side), start) in enumerate(zip(shapes, starts, strict=False)):
        first, columns = len(tiles), range(0, side, block)
        for number, column in enumerate(columns, first):
            transform = num_tiles * num**2 + (number if combines else index) * most * num
            factor = (first * num**2, len(columns), r, transform)
            tiles.append((*factor, start, side, column, number * num**2))
        factors.append(factor)
    num_sums = num_tiles * num**2 + (num_tiles if combines else len(shapes)) * most * num
    splits = max(1, min(_MAX_SPLITS, _SUM_NUMEL // num**2))
    tile_table, factor_table = (torch.tensor(rows, device="cpu").to(device) for rows in (tiles, factors))
    options = {"R": most, "NUM": num, "enable_fp_fusion": True}
    return _Plan(tile_table, factor_table, num_tiles, starts[-1], num_sums, options, block, splits, combines)


@triton.jit(do_not_specialize=["num_before", "num_tiles", "num_factors", "numel"])
def _multiply_candidates(
    tiles,
    x,
    old,
    sums,
    flags,
    before,
    num_before,
    num_tiles,
    num_factors,
    numel,
    R: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Writes a tile's share of ``C @ C.T`` without rows and columns of zeros, or checks a chunk of the rest.

    Each program writes whether its numbers and everything ``before`` are finite.
    """
    if tl.program_id(0) < num_tiles:
        tile = tiles + tl.program_id(0) * 8
        r, start, side = tl.load(tile + 2), tl.load(tile + 4), tl.load(tile + 5)
        columns = tl.load(tile + 6) + tl.arange(0, BLOCK)
        inside = columns < side
        c = tl.arange(0, NUM)
        at = start + (c % R)[:, None] * side + columns[None, :]
        there = (c % R < r)[:, None] & inside[None, :]
        candidates = tl.load(x + at, there & (c < R)[:, None], 0)
        if NUM > R:
            candidates += tl.load(old + at, there & (c >= R)[:, None], 0)
        is_bad = tl.max(tl.max(tl.where(tl.abs(candidates) < float("inf"), 0, 1), 1), 0)
        candidates = candidates.to(tl.float64)
        out = sums + tl.load(tile + 7) + c
        for i in range(r):
            row = tl.load(x + start + i * side + columns, inside, 0).to(tl.float64)
            tl.store(out + i * NUM, tl.sum(candidates * row[None, :], 1))
            if NUM > R:
                row = tl.load(old + start + i * side + columns, inside, 0).to(tl.float64)
                tl.store(out + (R + i) * NUM, tl.sum(candidates * row[None, :], 1))
    else:
        places = num_factors + (tl.program_id(0) - num_tiles).to(tl.int64) * REST_BLOCK + tl.arange(0, REST_BLOCK)
        rest = tl.load(x + places, places < numel, 0)
        is_bad = tl.max(tl.where(tl.abs(rest) < float("inf"), 0, 1), 0)
    tl.store(flags + tl.program_id(0), (is_bad == 0) & all_set(before, num_before))


@triton.jit
def _combine(
    factors,
    sums,
    transforms,
    R: tl.constexpr,
    NUM: tl.constexpr,
    SINGLE_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Finds the combinations for one factor."""
    _combine_rows(factors + tl.program_id(0) * 4, sums, transforms, R, NUM, SINGLE_NORM, SPLITS)


@triton.jit
def _combine_rows(
    factor, sums, transforms, R: tl.constexpr, NUM: tl.constexpr, SINGLE_NORM: tl.constexpr, SPLITS: tl.constexpr
):
    """Writes the combinations ``T`` ``(r, NUM)`` of the candidates of a ``factor`` that are orthonormal rows.

    This is Gram-Schmidt in float64, with the scalar product ``G = C @ C.T``. A second pass would not help, since the
    rounding of ``G`` is larger than what it would remove. ``left`` is the squared norm of what the rows found so far
    leave of each candidate.
    """
    begin, num_tiles, r = tl.load(factor), tl.load(factor + 1), tl.load(factor + 2)
    flat = tl.arange(0, NUM * NUM)
    there = ((flat // NUM) % R < r) & (flat % R < r)
    total = tl.zeros((NUM * NUM,), tl.float64)
    for first in range(0, num_tiles, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = sums + begin + split[:, None] * (NUM * NUM) + flat[None, :]
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


@triton.jit(do_not_specialize=["num_flags"])
def _apply(
    tiles,
    x,
    old,
    sums,
    flags,
    basis,
    num_flags,
    R: tl.constexpr,
    NUM: tl.constexpr,
    SINGLE_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMBINES: tl.constexpr,
):
    """Writes one tile of ``T @ C``, or of the old rows if the step was not finite."""
    tile = tiles + tl.program_id(0) * 8
    is_finite = all_set(flags, num_flags)
    if COMBINES:
        _combine_rows(tile, sums, sums, R, NUM, SINGLE_NORM, SPLITS)
        tl.debug_barrier()  # all threads must have written the combinations before any reads them
    r, start, side = tl.load(tile + 2), tl.load(tile + 4), tl.load(tile + 5)
    columns = tl.load(tile + 6) + tl.arange(0, BLOCK)
    inside = columns < side
    transform = sums + tl.load(tile + 3)
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
