"""Operations of `low_rank` in Triton; `low_rank` defines what they do.

The first programs of a launch have a tile of a matrix each, the others a chunk of the rest. Each tile writes partial
sums, which a second kernel adds up in a fixed order, so that no result depends on the order of programs.

A row of the table ``rest`` has: the first element of a chunk in the bucket, its first element in the message, and its
number of elements. ``RESIDUAL`` is 0 without a residual, 1 if it holds the sums, 2 if it is added to the bucket.

Products are sums of float32 or float64 products, never TF32. Multiplications and additions are fused on every rank,
whatever its version of Triton does by default.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_commopt.compressors.kernels.elementwise_triton import all_set, rounded_for
from lightning_commopt.compressors.kernels.factors import Parts
from lightning_commopt.compressors.kernels.launch_triton import launch
from lightning_commopt.compressors.kernels.low_rank import holds_sums
from lightning_commopt.compressors.kernels.low_rank_tiles_triton import (
    REST_BLOCK,
    SUM_BLOCK,
    load_tile,
    plan_for,
    product_tile,
    thin,
)

_SUM_SPLITS = 16  # partial sums that are added up at once: with `SUM_BLOCK` 8 numbers for each thread of 4 warps


def compress(
    bucket: Tensor,
    residual: Tensor | None,
    parts: Parts,
    sent: tuple[Tensor, Tensor] | None,
    factor: Tensor,
    message: Tensor,
    own: Tensor | None,
    scale: float,
    by_rows: bool,
) -> None:
    """Sets ``message`` to the products and the rest, times ``scale``."""
    plan = plan_for(parts, bucket.device, by_rows)
    partials = bucket.new_empty(plan.num_partials)
    num_chunks = plan.num_chunks if message.numel() > plan.num_factors else 0
    given = (bucket, bucket if residual is None else residual, *(sent or (factor, factor)), factor)
    constants = {"BY_ROWS": by_rows, "RESIDUAL": _kind(residual, bucket), "SCALE": scale, "BLOCK": REST_BLOCK}
    args = (plan.tiles, plan.rest, *given, partials, message, plan.num_tiles)
    launch(_compress, (plan.num_tiles + num_chunks, 1, 1), *args, **constants, **plan.options)

    constants = {"HAS_OWN": own is not None, "SCALE": scale, "SPLITS": _SUM_SPLITS, "BLOCK": SUM_BLOCK}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    out = (message, message if own is None else own)
    launch(_add_up, (plan.num_sums, 1, 1), plan.sums, partials, *out, **constants, **options)


def decompress(
    bucket: Tensor,
    residual: Tensor | None,
    parts: Parts,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    message: Tensor,
    finite: Tensor,
) -> None:
    """Sets the matrices to ``P Q^T``, copies the rest of the message, and updates the residual."""
    kind, added = _kind(residual, bucket), bucket if residual is None else residual
    if kind == 2:
        subtract_product(bucket, parts, own, added, finite)
    plan = plan_for(parts, bucket.device)
    behind_factors = message.numel() - plan.num_rest
    args = (plan.tiles, plan.rest, bucket, added, *mean, *own, message, finite)
    sizes = (plan.num_tiles, behind_factors, finite.numel())
    programs = (plan.num_tiles + plan.num_chunks, 1, 1)
    launch(_decompress, programs, *args, *sizes, RESIDUAL=kind, BLOCK=REST_BLOCK, **plan.options)


def subtract_product(flat: Tensor, parts: Parts, factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor) -> None:
    """Sets ``out = M - P Q^T``, if ``finite``."""
    plan = plan_for(parts, flat.device)
    args = (plan.tiles, flat, out, *factors, finite, finite.numel())
    launch(_subtract_product, (plan.num_tiles, 1, 1), *args, **plan.options)


def _kind(residual: Tensor | None, bucket: Tensor) -> int:
    return 0 if residual is None else 1 if holds_sums(residual, bucket) else 2


@triton.jit(do_not_specialize=["num_tiles"])
def _compress(
    tiles,
    rest,
    bucket,
    residual,
    sent_p,
    sent_q,
    factor,
    partials,
    message,
    num_tiles,
    BY_ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Adds the residual, and multiplies a tile by its part of the factor, or copies a chunk of the rest."""
    if tl.program_id(0) < num_tiles:
        m, k, r, rows, columns, elements, inside, p, q, out = load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        values = tl.load(bucket + elements, inside, 0)
        if RESIDUAL == 1:
            gradients = values
            kept = tl.load(residual + elements, inside, 0)
            kept -= product_tile(sent_p + p, sent_q + q, m, k, r, rows, columns, tl.zeros_like(kept), COLUMNS)
            values += kept
            tl.store(residual + elements, tl.where(tl.abs(gradients) < float("inf"), values, kept), inside)
        if RESIDUAL == 2:
            values += tl.load(residual + elements, inside, 0).to(values.dtype)
            tl.store(bucket + elements, values, inside)
        if COLUMNS > 0:
            for i in tl.static_range(COLUMNS):
                _multiply(values, factor, p, q, i, m, k, r, rows, columns, partials + out, BY_ROWS)
        else:
            for i in range(r):
                _multiply(values, factor, p, q, i, m, k, r, rows, columns, partials + out, BY_ROWS)
    else:
        at, places, there = _load_chunk(rest, num_tiles, BLOCK)
        chunk = tl.load(bucket + at, there, 0)
        if RESIDUAL != 0:
            chunk += tl.load(residual + at, there, 0).to(chunk.dtype)
        tl.store(message + places, chunk * SCALE, there)


@triton.jit
def _multiply(values, factor, p, q, i, m, k, r, rows, columns, out, BY_ROWS: tl.constexpr):
    """Multiplies a tile by its part of column ``i`` of the factor, if the factor has it."""
    if BY_ROWS:
        part = tl.sum(values * thin(factor + q, i, r, k, columns)[None, :], 1)
        tl.store(out + i * m + rows, part, rows < tl.where(i < r, m, 0))
    else:
        part = tl.sum(values * thin(factor + p, i, r, m, rows)[:, None], 0)
        tl.store(out + i * k + columns, part, columns < tl.where(i < r, k, 0))


@triton.jit
def _load_chunk(rest, num_tiles, BLOCK: tl.constexpr):
    """Returns the places of this program's elements in the bucket and in the message, and which of them exist."""
    row = rest + (tl.program_id(0) - num_tiles) * 3
    i = tl.arange(0, BLOCK)
    return tl.load(row) + i, tl.load(row + 1) + i, i < tl.load(row + 2)


@triton.jit
def _add_up(
    sums, partials, out, own, HAS_OWN: tl.constexpr, SCALE: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds up partial sums, always in the same order.

    A row of ``sums`` has: the first element in ``partials``, the number of elements to add and the distance between
    them; the place of the sum in ``out``; and the number of sums from there to the end.
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
    places = tl.load(row + 3) + i
    if HAS_OWN:
        tl.store(own + places, total, inside)
    tl.store(out + places, total * SCALE, inside)


@triton.jit(do_not_specialize=["num_tiles", "behind_factors", "num_flags"])
def _decompress(
    tiles,
    rest,
    bucket,
    residual,
    factor_p,
    factor_q,
    own_p,
    own_q,
    message,
    finite,
    num_tiles,
    behind_factors,
    num_flags,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Writes a tile, or a chunk of the rest.

    If the step was not finite, it subtracts the gradients from the sums, and sets the sent factors to zero.
    """
    is_finite = all_set(finite, num_flags)
    if tl.program_id(0) < num_tiles:
        m, k, r, rows, columns, elements, inside, p, q, _ = load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        mean = tl.zeros((TILE_M, TILE_K), bucket.dtype.element_ty)
        if is_finite:
            mean = product_tile(factor_p + p, factor_q + q, m, k, r, rows, columns, mean, COLUMNS)
        else:
            if RESIDUAL == 1:
                gradients = tl.load(bucket + elements, inside, 0)
                sums = tl.load(residual + elements, inside, 0)
                sums -= tl.where(tl.abs(gradients) < float("inf"), gradients, 0)
                tl.store(residual + elements, tl.where(tl.abs(sums) < float("inf"), sums, 0), inside)
                for i in range(r):
                    tl.store(own_p + p + i * m + rows, tl.zeros((TILE_M,), bucket.dtype.element_ty), rows < m)
                    tl.store(own_q + q + i * k + columns, tl.zeros((TILE_K,), bucket.dtype.element_ty), columns < k)
            mean += float("nan")
        tl.store(bucket + elements, mean, inside)
    else:
        at, places, there = _load_chunk(rest, num_tiles, BLOCK)
        tl.store(bucket + at, tl.load(message + behind_factors + places, there, 0), there)
        if RESIDUAL != 0:  # noqa: SIM102 - Triton would compute both sides of `and`
            if is_finite:
                tl.store(residual + at, tl.zeros((BLOCK,), residual.dtype.element_ty), there)


@triton.jit(do_not_specialize=["num_flags"])
def _subtract_product(
    tiles,
    flat,
    out,
    factor_p,
    factor_q,
    finite,
    num_flags,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Subtracts the product from one tile."""
    if all_set(finite, num_flags):
        m, k, r, rows, columns, elements, inside, p, q, _ = load_tile(tiles, ALIGNED, TILE_M, TILE_K)
        rest = tl.load(flat + elements, inside, 0)
        rest -= product_tile(factor_p + p, factor_q + q, m, k, r, rows, columns, tl.zeros_like(rest), COLUMNS)
        tl.store(out + elements, rounded_for(out, rest), inside)
