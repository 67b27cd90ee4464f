"""The arithmetic of low-rank compressors before and after a collective: products of matrices with thin factors.

Shapes are those of `factors`; a bucket has ``n`` elements. Factors are stored column by column: in memory ``p`` is
``(r, m)`` and ``q`` is ``(r, k)``. A message holds the factors of all matrices, and then the uncompressed rest.

The residual update is deferred to the next step, which saves one read and one write of all matrices: 8 of 28 bytes per
element in a step of two rounds. Between two steps the residual holds the sums of gradients and residual that were to be
sent, and the state holds the factors of what was sent. `fold_and_multiply` makes the sums of the next step from both.

Example: the bucket ``[1, 2, 3, 4, 5]`` holds ``Matrix(start=1, m=2, k=2, r=1)``, which is ``[[2, 3], [4, 5]]``. With
a residual of zeros and ``q = [1, 0]``, `fold_and_multiply` by rows gives its first column, ``p = [2, 4]``, and leaves
the matrix in the residual. With ``p = [0, 1]``, `multiply` by columns gives its last row, ``q = [4, 5]``. When this row
has been sent, `write_product` turns the bucket into ``[1, 0, 0, 4, 5]``, and `subtract_product` the residual into
``[2, 3, 0, 0]``.

On CUDA `compress` and `decompress` are a few kernels for the whole bucket. On CPU they consist of the other operations,
which in plain torch work in chunks that stay in the cache; most have a fused form in C for float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_, foreach_mul_
from lightning_commopt.compressors.kernels.dispatch import also_in
from lightning_commopt.compressors.kernels.elementwise import CHUNK_NUMEL
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel, per_matrix

MAX_COLUMNS_ONE_BY_ONE = 4
"""Up to this many columns of the factors are multiplied one after another, because torch's product of thin matrices is
slower; more columns are multiplied in one product."""


def holds_sums(residual: Tensor | None, bucket: Tensor) -> bool:
    """Returns whether the residual keeps the sums until the next step.

    A residual of another dtype would round the sums, so it is updated at once instead.
    """
    return residual is not None and residual.dtype == bucket.dtype


@also_in("triton")
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
    """Sets ``message`` to ``scale`` times ``P = M Q`` of every matrix (or ``Q = M^T P``), and of the rest.

    ``M`` is the sum of a matrix of the bucket and its residual. Afterwards these sums are in the residual if it
    `holds_sums`, else in the bucket.

    Args:
        bucket: ``(n,)`` float32 or float64.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        parts: how the bucket is cut.
        sent: ``P`` and ``Q`` that the last step has sent of a residual that `holds_sums`; else None.
        factor: ``Q`` of all matrices if ``by_rows``, else ``P``, in the dtype of the bucket.
        message: factors and rest, in that dtype; overwritten. The rest is left out if the message ends before it.
        own: receives the products without ``scale``, in that dtype; None if they are not needed.
        scale: multiplies the message.
        by_rows: whether rows of the matrices are summed up, or columns.
    """
    num_factors = factors_numel(parts.p_shapes if by_rows else parts.q_shapes)
    products = message[:num_factors] if own is None else own
    p, q = (products, factor) if by_rows else (factor, products)
    if sent is not None and residual is not None:
        fold_and_multiply(bucket, residual, parts, sent, p, q, by_rows)
    else:
        if residual is not None:
            for matrix in parts.matrices:
                matrix.of(bucket).add_(matrix.of(residual))
        multiply(bucket, parts, p, q, by_rows)
    if own is not None:
        message[:num_factors].copy_(own)
    if message.numel() > num_factors:
        torch.cat(parts.rest_of(bucket), out=message[num_factors:])
        if residual is not None:
            message[num_factors:].add_(torch.cat(parts.rest_of(residual)))
    message.mul_(scale)


@also_in("triton")
def decompress(
    bucket: Tensor,
    residual: Tensor | None,
    parts: Parts,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    message: Tensor,
    finite: Tensor,
) -> None:
    """Sets the matrices to ``P Q^T`` of the mean, copies the rest of the message, and updates the residual.

    Args:
        bucket: ``(n,)`` after `compress`; overwritten.
        residual: ``(n,)`` after `compress`, or None; updated in place. Its rest becomes zero; its matrices hold what
            was not sent, or still the sums if it `holds_sums`. If the step was not finite, it becomes what it was
            before `compress`.
        parts: how the bucket is cut.
        own: ``P`` and ``Q`` of what this rank has sent, which the caller keeps for the next step. If the step was not
            finite and the residual `holds_sums`, they become zero.
        mean: ``P`` and ``Q`` of the average.
        message: average of the message with the rest.
        finite: 0-dim bool, or ``(k,)`` bool for parts of the step; if any is false, matrices become NaN. On CUDA the
            host does not wait for it.
    """
    finite, folded = finite.all(), residual if holds_sums(residual, bucket) else None
    if folded is not None:
        for factor in own:
            factor.masked_fill_(~finite, 0)
    elif residual is not None:
        subtract_product(bucket, parts, own, residual, finite)
    if residual is not None and parts.rest:
        # The residual itself is always finite, so this product is zero or the residual.
        foreach_mul_(parts.rest_of(residual), (~finite).to(residual.dtype))
    write_product(bucket, folded, parts, mean, finite)
    if parts.rest:
        rest = message[message.numel() - sum(parts.rest_numels) :]
        foreach_copy_(parts.rest_of(bucket), rest.split(parts.rest_numels))


@also_in("c")
def fold_and_multiply(
    gradient: Tensor,
    residual: Tensor,
    parts: Parts,
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    """Sets ``residual += gradient - P Q^T`` with the factors ``sent``, and then multiplies it as `multiply` does.

    A gradient that is not finite makes elements of the product not finite, and is not added to the residual.

    Args:
        gradient: ``(n,)`` the bucket, float32 or float64.
        residual: ``(n,)`` of the same dtype; its matrices are overwritten.
        parts: how the bucket is cut.
        sent: ``(sum of r * m,)`` and ``(sum of r * k,)``, the factors of what was sent of the residual.
        p: ``(sum of r * m,)``, of the same dtype; overwritten if ``by_rows``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten if not.
        by_rows: see `multiply`.
    """
    for matrix, (sent_p, sent_q), (its_p, its_q) in per_matrix(parts, sent, (p, q)):
        chunks = _row_chunks(matrix)
        scratch = torch.empty_like(matrix.of(residual)[chunks[0]])
        for rows in chunks:
            new, part = matrix.of(gradient)[rows], matrix.of(residual)[rows]
            kept = scratch[: len(part)]
            _subtract_product(part, sent_p[:, rows], sent_q, out=kept)
            torch.add(kept, new, out=part)
            if not _multiply(part, rows, its_p, its_q, by_rows).isfinite().all():
                torch.where(new.isfinite(), part, kept, out=part)


@also_in("c")
def multiply(flat: Tensor, parts: Parts, p: Tensor, q: Tensor, by_rows: bool) -> None:
    """Sets ``P = M Q`` for every matrix if ``by_rows``, else ``Q = M^T P``.

    Args:
        flat: ``(n,)`` float32 or float64.
        parts: how the bucket is cut.
        p: ``(sum of r * m,)``, of the dtype of ``flat``; overwritten if ``by_rows``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten if not.
        by_rows: whether rows of the matrices are summed up, or columns.
    """
    for matrix, (its_p, its_q) in per_matrix(parts, (p, q)):
        for rows in _row_chunks(matrix):
            _multiply(matrix.of(flat)[rows], rows, its_p, its_q, by_rows)


@also_in("triton", "c")
def subtract_product(flat: Tensor, parts: Parts, factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor) -> None:
    """Sets ``out = M - P Q^T`` for every matrix; in place it gives the same bits as `fold_and_multiply`.

    Args:
        flat: ``(n,)`` float32 or float64.
        parts: how the bucket is cut.
        factors: ``(sum of r * m,)`` and ``(sum of r * k,)``, of the dtype of ``flat``.
        out: ``(n,)`` of any floating-point dtype, or ``flat`` itself; its matrices are overwritten.
        finite: see `decompress`; if any is false, ``out`` stays.
    """
    if not finite.all():
        return
    for matrix, (p, q) in per_matrix(parts, factors):
        for rows in _row_chunks(matrix):
            _subtract_product(matrix.of(flat)[rows], p[:, rows], q, out=matrix.of(out)[rows])


@also_in("c")
def write_product(
    flat: Tensor,
    residual: Tensor | None,
    parts: Parts,
    factors: tuple[Tensor, Tensor],
    finite: Tensor,
) -> None:
    """Sets ``M = P Q^T`` for every matrix, or to NaN after a step that is not finite.

    In that case the gradients are subtracted from the residual again, which gives the residual before this step, up to
    the rounding of the sums, or zero if that is not finite. All ranks get the same bits of a product, whether they have
    a compiler or not.

    Args:
        flat: ``(n,)`` the bucket with its gradients, float32 or float64; its matrices are overwritten.
        residual: ``(n,)`` of the same dtype, from `fold_and_multiply`; None if nothing was folded.
        parts: how the bucket is cut.
        factors: ``(sum of r * m,)`` and ``(sum of r * k,)``, of the same dtype.
        finite: 0-dim bool. On CUDA the host does not wait for it.
    """
    for matrix, (p, q) in per_matrix(parts, factors):
        whole = matrix.of(flat)
        if finite:
            _write_product(matrix, p, q, out=whole)
            continue
        if residual is not None:
            folded = matrix.of(residual)
            folded.sub_(whole.masked_fill(~whole.isfinite(), 0)).nan_to_num_(0, 0, 0)
        whole.fill_(torch.nan)


def _row_chunks(matrix: Matrix) -> list[slice]:
    num_rows = max(1, CHUNK_NUMEL // matrix.k)
    return [slice(start, start + num_rows) for start in range(0, matrix.m, num_rows)]


def _multiply(part: Tensor, rows: slice, p: Tensor, q: Tensor, by_rows: bool) -> Tensor:
    """Multiplies some rows of a matrix, chunk after chunk from the first; returns their part of the product."""
    if by_rows:
        return torch.mm(q, part.T, out=p[:, rows])
    product = p[:, rows] @ part
    if rows.start:
        q.add_(product)
    else:
        q.copy_(product)
    return product


def _subtract_product(part: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = part - P Q^T``, one column of the factors after another, which on CPU is faster than one product."""
    rest = out if out.dtype == part.dtype else torch.empty_like(part)
    torch.addcmul(part, p[0].unsqueeze(1), q[0], value=-1, out=rest)
    for column_p, column_q in zip(p[1:], q[1:], strict=True):
        rest.addcmul_(column_p.unsqueeze(1), column_q, value=-1)
    if rest is not out:
        out.copy_(rest)


def _write_product(matrix: Matrix, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = P Q^T``."""
    scratch = torch.empty_like(out[_row_chunks(matrix)[0]]) if 1 < matrix.r <= MAX_COLUMNS_ONE_BY_ONE else None
    for rows in _row_chunks(matrix):
        part = out[rows]
        if scratch is None:
            torch.mm(p[:, rows].T, q, out=part)
            continue
        product = scratch[: len(part)]
        torch.mul(p[0, rows].unsqueeze(1), q[0], out=part)
        for column_p, column_q in zip(p[1:, rows], q[1:], strict=True):
            # The product and the sum are rounded separately, as on every rank.
            part.add_(torch.mul(column_p.unsqueeze(1), column_q, out=product))
