"""What low-rank compressors do to a bucket before and after a collective: products of its matrices with thin factors.

Shapes: as in `factors`; ``n`` elements in a bucket. Factors are stored column by column: in memory ``p`` is ``(r, m)``
and ``q`` is ``(r, k)``. A message holds the factors of all matrices, and behind them what is sent as it is, the rest.

The residual update is deferred to the next step, which saves one read and one write of all matrices: 8 of 28 bytes for
each element in a step of two rounds. Between the steps a residual holds the sums, of gradient and residual, that were
to be sent, and beside it are the factors of what was sent of them. `fold_and_multiply` makes the sums of the next step
from these.

Example: the bucket ``[1, 2, 3, 4, 5]`` holds ``Matrix(start=1, m=2, k=2, r=1)``, which is ``[[2, 3], [4, 5]]``. With
a residual of zeros and ``q = [1, 0]``, `fold_and_multiply` by rows gives its first column, ``p = [2, 4]``, and leaves
the matrix in the residual. With ``p = [0, 1]``, `multiply` by columns gives its last row, ``q = [4, 5]``. This row is
sent: `write_product` makes ``[1, 0, 0, 4, 5]`` of the bucket, and by `subtract_product` the residual is
``[2, 3, 0, 0]``.

`compress` and `decompress` are a few kernels for the whole bucket on CUDA. On CPU they are made of the other
operations, which run in plain torch in chunks that stay in its cache; most are fused for float32, in C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_, foreach_mul_
from lightning_commopt.compressors.kernels.dispatch import also_in
from lightning_commopt.compressors.kernels.elementwise import CHUNK_NUMEL
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel, per_matrix

MAX_COLUMNS_ONE_BY_ONE = 4
"""Columns of the factors up to which they are multiplied one after another; more in a product of matrices."""


def holds_sums(residual: Tensor | None, bucket: Tensor) -> bool:
    """Returns whether the residual keeps the sums until the next step.

    One of another dtype would round them: then they are in the bucket, and the residual is updated at once.
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

    ``M`` is a matrix of the bucket, plus its residual: these sums are in the residual afterwards if it `holds_sums`,
    else in the bucket.

    Args:
        bucket: ``(n,)`` float32 or float64.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        parts: of the bucket.
        sent: ``P`` and ``Q`` of what was sent of a residual that `holds_sums`; else None.
        factor: ``Q`` of all matrices if ``by_rows``, else ``P``; of the dtype of the bucket.
        message: factors and rest, of that dtype; overwritten. Without its end, the rest is not sent.
        own: factors, of that dtype: gets the products without ``scale``. None if nobody needs them.
        scale: factor.
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
    """Sets the matrices to ``P Q^T`` of the mean and the rest to that of the message; updates the residual.

    Args:
        bucket: ``(n,)`` as `compress` left it; overwritten.
        residual: ``(n,)`` as `compress` left it; its rest becomes zero, and its matrices hold what was not sent, or
            still sums if it `holds_sums`. As it was before `compress` if the step was not finite. None if there is
            none.
        parts: of the bucket.
        own: ``P`` and ``Q`` of what this rank has sent. If the step was not finite they become zero where the residual
            `holds_sums`, and are the caller's to keep.
        mean: ``P`` and ``Q`` of the average.
        message: the average of the message with the rest.
        finite: 0-dim bool, or ``(k,)`` bool of parts of the step; if any is false, matrices become NaN. On CUDA the
            host does not wait for it.
    """
    finite, folded = finite.all(), residual if holds_sums(residual, bucket) else None
    if folded is not None:
        for factor in own:
            factor.masked_fill_(~finite, 0)
    elif residual is not None:
        subtract_product(bucket, parts, own, residual, finite)
    if residual is not None and parts.rest:
        foreach_mul_(parts.rest_of(residual), (~finite).to(residual.dtype))  # it is always finite itself
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
    """Sets ``residual += gradient - P Q^T`` of ``sent``, and multiplies that as `multiply` does, for every matrix.

    A gradient that is not finite makes elements of the product so, and is not added to the residual.

    Args:
        gradient: ``(n,)`` the bucket, float32 or float64.
        residual: ``(n,)`` of the same dtype; overwritten at the matrices.
        parts: of the bucket.
        sent: ``(sum of r * m,)`` and ``(sum of r * k,)``, what was sent of the residual.
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
        parts: of the bucket.
        p: ``(sum of r * m,)``, of the dtype of ``flat``; overwritten if ``by_rows``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten if not.
        by_rows: whether rows of the matrices are summed up, or columns.
    """
    for matrix, (its_p, its_q) in per_matrix(parts, (p, q)):
        for rows in _row_chunks(matrix):
            _multiply(matrix.of(flat)[rows], rows, its_p, its_q, by_rows)


@also_in("triton", "c")
def subtract_product(flat: Tensor, parts: Parts, factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor) -> None:
    """Sets ``out = M - P Q^T`` for every matrix. In place with the bits that `fold_and_multiply` would have of it.

    Args:
        flat: ``(n,)`` float32 or float64.
        parts: of the bucket.
        factors: ``(sum of r * m,)`` and ``(sum of r * k,)``, of the dtype of ``flat``.
        out: ``(n,)`` of any floating-point dtype, or ``flat`` itself; overwritten at the matrices.
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

    Then the gradients are taken out of the residual again, which gives the residual before this step, up to the
    rounding of sums with them; zero where that is not finite. All ranks get the same bits of a product, whether they
    have a compiler or not.

    Args:
        flat: ``(n,)`` the bucket with its gradients, float32 or float64; its matrices are overwritten.
        residual: ``(n,)`` of the same dtype, from `fold_and_multiply`; None if nothing was folded.
        parts: of the bucket.
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
    """Multiplies some rows of a matrix, from the first ones on; returns their own part of the product."""
    if by_rows:
        return torch.mm(q, part.T, out=p[:, rows])
    product = p[:, rows] @ part
    if rows.start:
        q.add_(product)
    else:
        q.copy_(product)
    return product


def _subtract_product(part: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = part - P Q^T``, one column of the factors after another: faster on CPU than a thin product."""
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
            part.add_(torch.mul(column_p.unsqueeze(1), column_q, out=product))  # in two roundings everywhere
