"""Products of all matrices of a bucket with thin factors.

Shapes: a matrix ``M`` ``(m, k)``, contiguous within the bucket; its factors, stored transposed, ``P`` ``(r, m)`` and
``Q`` ``(r, k)``; the matrix that they stand for is ``P.T @ Q``. The factors of all matrices of a bucket lie one behind
another in one tensor: ``p`` ``(sum of r * m,)`` and ``q`` ``(sum of r * k,)``.

What is owed is not calculated when a step ends, but when the next one needs it: between the steps a residual holds
the matrices that were to be sent, and beside it are the factors of what was sent of them. That saves to read and write
all of it once more: of 28 bytes for each element in a step of two rounds, 20 are left.

Example: the bucket ``[1, 2, 3, 4, 5]`` holds ``Matrix(start=1, m=2, k=2, r=1)``, which is ``[[2, 3], [4, 5]]``. With
a residual of zeros and ``q = [1, 0]``, `fold` by rows gives its first column, ``p = [2, 4]``, and leaves the matrix in
the residual. With ``p = [0, 1]``, `multiply` by columns gives its last row, ``q = [4, 5]``. This row is sent:
`write_product` makes ``[1, 0, 0, 4, 5]`` of the bucket, and what is owed, by `subtract_product`, is ``[2, 3, 0, 0]``.

Plain torch forms, which define the operations and run on CPU in chunks that stay in its cache. On CUDA one fused kernel
each, for all matrices at once; most are fused for float32 on CPU as well, in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_commopt.kernels.chunks import CHUNK_NUMEL, use_compiled, use_triton

_MOST_ROWS_ONE_BY_ONE = 4
"""Rows of the factors up to which they are multiplied one after another; more in a product of matrices."""


class Matrix(NamedTuple):
    """Where a matrix lies in its bucket, and how thin its factors are.

    Attributes:
        start: its first element.
        m: rows.
        k: columns.
        r: rows of each of its factors.
    """

    start: int
    m: int
    k: int
    r: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the view ``(m, k)`` of a bucket."""
        return flat[self.start : self.start + self.m * self.k].view(self.m, self.k)


def p_shapes(matrices: Sequence[Matrix]) -> tuple[tuple[int, int], ...]:
    """Returns ``(r, m)`` of each matrix."""
    return tuple((matrix.r, matrix.m) for matrix in matrices)


def q_shapes(matrices: Sequence[Matrix]) -> tuple[tuple[int, int], ...]:
    """Returns ``(r, k)`` of each matrix."""
    return tuple((matrix.r, matrix.k) for matrix in matrices)


def views(factors: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns views of these shapes of factors that lie one behind another."""
    parts = factors.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def each(matrices: tuple[Matrix, ...], *pairs: tuple[Tensor, Tensor]) -> Iterator[tuple[Any, ...]]:
    """Gives each matrix with its views of pairs of factors, ``P`` and ``Q`` of all matrices."""
    ps, qs = p_shapes(matrices), q_shapes(matrices)
    return zip(matrices, *(zip(views(p, ps), views(q, qs), strict=True) for p, q in pairs), strict=True)


def fold(
    gradient: Tensor,
    residual: Tensor,
    matrices: tuple[Matrix, ...],
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    """Sets ``residual += gradient - P.T @ Q`` of ``sent``, and multiplies that as `multiply` does, for every matrix.

    A gradient that is not finite makes elements of the product so, and is not added to the residual.

    Args:
        gradient: ``(n,)`` the bucket, float32 or float64.
        residual: ``(n,)`` of the same dtype; overwritten at the matrices.
        matrices: of the bucket.
        sent: ``(sum of r * m,)`` and ``(sum of r * k,)``, what was sent of the residual.
        p: ``(sum of r * m,)``, of the same dtype; overwritten if ``by_rows``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten if not.
        by_rows: see `multiply`.
    """
    if use_triton(gradient):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.fold(gradient, residual, matrices, sent, p, q, by_rows)
    if use_compiled(gradient):
        from lightning_commopt.kernels import low_rank_compiled

        return low_rank_compiled.fold(gradient, residual, matrices, sent, p, q, by_rows)
    for matrix, (sent_p, sent_q), (its_p, its_q) in each(matrices, sent, (p, q)):
        chunks = _row_chunks(matrix)
        scratch = torch.empty_like(matrix.of(residual)[chunks[0]])
        for rows in chunks:
            new, part = matrix.of(gradient)[rows], matrix.of(residual)[rows]
            owed = scratch[: len(part)]
            _subtract_product(part, sent_p[:, rows], sent_q, out=owed)
            torch.add(owed, new, out=part)
            if not _multiply(part, rows, its_p, its_q, by_rows).isfinite().all():
                torch.where(new.isfinite(), part, owed, out=part)
    return None


def multiply(flat: Tensor, matrices: tuple[Matrix, ...], p: Tensor, q: Tensor, by_rows: bool) -> None:
    """Sets ``P = Q @ M.T`` for every matrix if ``by_rows``, else ``Q = P @ M``.

    Args:
        flat: ``(n,)`` float32 or float64.
        matrices: of the bucket.
        p: ``(sum of r * m,)``, of the dtype of ``flat``; overwritten if ``by_rows``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten if not.
        by_rows: whether rows of the matrices are summed up, or columns.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.multiply(flat, matrices, p, q, by_rows)
    if use_compiled(flat) and not by_rows:
        from lightning_commopt.kernels import low_rank_compiled

        return low_rank_compiled.multiply_columns(flat, matrices, p, q)
    for matrix, (its_p, its_q) in each(matrices, (p, q)):
        for rows in _row_chunks(matrix):
            _multiply(matrix.of(flat)[rows], rows, its_p, its_q, by_rows)
    return None


def subtract_product(
    flat: Tensor, matrices: tuple[Matrix, ...], factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor
) -> None:
    """Sets ``out = M - P.T @ Q`` for every matrix. In place with the bits that `fold` would have of it.

    Args:
        flat: ``(n,)`` float32 or float64.
        matrices: of the bucket.
        factors: ``(sum of r * m,)`` and ``(sum of r * k,)``, of the dtype of ``flat``.
        out: ``(n,)`` of any floating-point dtype, or ``flat`` itself; overwritten at the matrices.
        finite: 0-dim bool; if it is false, ``out`` stays. On CUDA nobody waits for it.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.subtract_product(flat, matrices, factors, out, finite)
    if not finite:
        return None
    if use_compiled(flat) and out is flat:
        from lightning_commopt.kernels import low_rank_compiled

        return low_rank_compiled.subtract_product(matrices, factors, out)
    for matrix, (p, q) in each(matrices, factors):
        for rows in _row_chunks(matrix):
            _subtract_product(matrix.of(flat)[rows], p[:, rows], q, out=matrix.of(out)[rows])
    return None


def write_product(
    flat: Tensor,
    residual: Tensor | None,
    matrices: tuple[Matrix, ...],
    factors: tuple[Tensor, Tensor],
    finite: Tensor,
) -> None:
    """Sets ``M = P.T @ Q`` for every matrix, or to NaN after a step that is not finite.

    Then the gradients are taken out of the residual again, which gives what was owed before, up to the rounding of
    sums with them; zero where that is not finite.

    Args:
        flat: ``(n,)`` the bucket with its gradients, float32 or float64; its matrices are overwritten.
        residual: ``(n,)`` of the same dtype, from `fold`; None if nothing was folded.
        matrices: of the bucket.
        factors: ``(sum of r * m,)`` and ``(sum of r * k,)``, of the same dtype.
        finite: 0-dim bool. On CUDA nobody waits for it.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.write_product(flat, residual, matrices, factors, finite)
    for matrix, (p, q) in each(matrices, factors):
        whole = matrix.of(flat)
        if finite:
            _write_product(matrix, p, q, out=whole)
            continue
        if residual is not None:
            folded = matrix.of(residual)
            folded.sub_(whole.masked_fill(~whole.isfinite(), 0)).nan_to_num_(0, 0, 0)
        whole.fill_(torch.nan)
    return None


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
    """Sets ``out = part - p.T @ q``, one row of the factors after another: faster on CPU than a thin product."""
    rest = out if out.dtype == part.dtype else torch.empty_like(part)
    torch.addcmul(part, p[0].unsqueeze(1), q[0], value=-1, out=rest)
    for row_p, row_q in zip(p[1:], q[1:], strict=True):
        rest.addcmul_(row_p.unsqueeze(1), row_q, value=-1)
    if rest is not out:
        out.copy_(rest)


def _write_product(matrix: Matrix, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = p.T @ q``. All ranks must get the same bits of it, whether they have a compiler or not."""
    if matrix.r <= _MOST_ROWS_ONE_BY_ONE and use_compiled(out):
        from lightning_commopt.kernels import low_rank_compiled

        return low_rank_compiled.write_product(matrix, p, q, out)
    scratch = torch.empty_like(out[_row_chunks(matrix)[0]]) if 1 < matrix.r <= _MOST_ROWS_ONE_BY_ONE else None
    for rows in _row_chunks(matrix):
        part = out[rows]
        if scratch is None:
            torch.mm(p[:, rows].T, q, out=part)
            continue
        product = scratch[: len(part)]
        torch.mul(p[0, rows].unsqueeze(1), q[0], out=part)
        for row_p, row_q in zip(p[1:, rows], q[1:], strict=True):
            part.add_(torch.mul(row_p.unsqueeze(1), row_q, out=product))  # in two roundings everywhere
    return None
