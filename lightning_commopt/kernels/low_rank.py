"""Products of all matrices of a bucket with thin factors.

Shapes: a matrix ``M`` ``(m, k)``, contiguous within the bucket; its factors, stored transposed, ``P`` ``(r, m)`` and
``Q`` ``(r, k)``; the matrix that they stand for is ``P.T @ Q``.

Plain torch forms, which define the operations and run on CPU in chunks that stay in its cache. On CUDA one fused kernel
each, for all matrices at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.kernels.chunks import CHUNK_NUMEL, use_triton


class Matrix(NamedTuple):
    """Where a matrix lies in its bucket.

    Attributes:
        start: its first element.
        m: rows.
        k: columns.
    """

    start: int
    m: int
    k: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the view ``(m, k)`` of a bucket."""
        return flat[self.start : self.start + self.m * self.k].view(self.m, self.k)


def multiply_rows(
    flat: Tensor, residual: Tensor | None, matrices: Sequence[Matrix], qs: Sequence[Tensor], ps: Sequence[Tensor]
) -> None:
    """Sets ``P = Q @ M.T`` for every matrix, after adding the residual to it.

    Args:
        flat: ``(n,)`` the bucket, float32 or float64; ``residual`` is added to its matrices in place.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        matrices: of the bucket.
        qs: ``(r, k)`` for each matrix, of the dtype of ``flat``.
        ps: ``(r, m)`` for each matrix, of the same dtype; overwritten.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.multiply_rows(flat, residual, matrices, qs, ps)
    for matrix, q, p in zip(matrices, qs, ps, strict=True):
        for rows, part in _corrected_rows(flat, residual, matrix):
            torch.mm(q, part.T, out=p[:, rows])
    return None


def multiply_columns(
    flat: Tensor, residual: Tensor | None, matrices: Sequence[Matrix], ps: Sequence[Tensor], qs: Sequence[Tensor]
) -> None:
    """Sets ``Q = P @ M`` for every matrix, after adding the residual to it.

    Args:
        flat: ``(n,)`` the bucket, float32 or float64; ``residual`` is added to its matrices in place.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        matrices: of the bucket.
        ps: ``(r, m)`` for each matrix, of the dtype of ``flat``.
        qs: ``(r, k)`` for each matrix, of the same dtype; overwritten.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.multiply_columns(flat, residual, matrices, ps, qs)
    for matrix, p, q in zip(matrices, ps, qs, strict=True):
        q.zero_()
        for rows, part in _corrected_rows(flat, residual, matrix):
            q.addmm_(p[:, rows], part)
    return None


def settle(
    flat: Tensor,
    residual: Tensor | None,
    matrices: Sequence[Matrix],
    own: Sequence[tuple[Tensor, Tensor]],
    mean: Sequence[tuple[Tensor, Tensor]],
    finite: Tensor,
) -> None:
    """Sets ``residual = M - P.T @ Q`` of this rank's factors, then ``M = P.T @ Q`` of the mean's.

    Args:
        flat: ``(n,)`` the bucket, with the residual added; its matrices are overwritten.
        residual: ``(n,)``, or None where it is not wanted; overwritten at the matrices.
        matrices: of the bucket.
        own: ``P`` ``(r, m)`` and ``Q`` ``(r, k)`` of this rank, for each matrix.
        mean: those of the average.
        finite: 0-dim bool; if it is false, ``residual`` stays and the matrices become NaN.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.settle(flat, residual, matrices, own, mean, finite)
    for matrix, (own_p, own_q), (p, q) in zip(matrices, own, mean, strict=True):
        whole = matrix.of(flat)
        if not finite:
            whole.fill_(torch.nan)
            continue
        owed = None if residual is None else matrix.of(residual)
        for rows in _row_chunks(matrix):
            part = whole[rows]
            if owed is not None:
                _subtract_product(part, own_p[:, rows], own_q, out=owed[rows])
            torch.mm(p[:, rows].T, q, out=part)
    return None


def _row_chunks(matrix: Matrix) -> list[slice]:
    num_rows = max(1, CHUNK_NUMEL // matrix.k)
    return [slice(start, start + num_rows) for start in range(0, matrix.m, num_rows)]


def _corrected_rows(
    flat: Tensor, residual: Tensor | None, matrix: Matrix
) -> Generator[tuple[slice, Tensor], None, None]:
    """Adds the residual to a matrix, and yields its rows by and by."""
    whole = matrix.of(flat)
    owed = None if residual is None else matrix.of(residual)
    for rows in _row_chunks(matrix):
        yield rows, whole[rows] if owed is None else whole[rows].add_(owed[rows])


def _subtract_product(part: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = part - p.T @ q``, one row of the factors after another: faster on CPU than a thin product."""
    rest = out if out.dtype == part.dtype else torch.empty_like(part)
    torch.addcmul(part, p[0].unsqueeze(1), q[0], value=-1, out=rest)
    for row_p, row_q in zip(p[1:], q[1:], strict=True):
        rest.addcmul_(row_p.unsqueeze(1), row_q, value=-1)
    if rest is not out:
        out.copy_(rest)
