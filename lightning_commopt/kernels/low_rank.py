"""Products of all matrices of a bucket with thin factors.

Shapes: a matrix ``M`` ``(m, k)``, contiguous within the bucket; its factors, stored transposed, ``P`` ``(r, m)`` and
``Q`` ``(r, k)``; the matrix that they stand for is ``P.T @ Q``. The factors of all matrices of a bucket lie one behind
another in one tensor: ``p`` ``(sum of r * m,)`` and ``q`` ``(sum of r * k,)``.

Example: the bucket ``[1, 2, 3, 4, 5]`` holds ``Matrix(start=1, m=2, k=2, r=1)``, which is ``[[2, 3], [4, 5]]``. With
``q = [1, 0]``, its first column, `multiply_rows` gives ``p = [2, 4]``; with ``p = [0, 1]`` `multiply_columns` gives its
last row, ``q = [4, 5]``, and `settle` turns the bucket into ``[1, 0, 0, 4, 5]``, with ``[2, 3, 0, 0]`` in the residual.

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


def multiply_rows(flat: Tensor, residual: Tensor | None, matrices: tuple[Matrix, ...], q: Tensor, p: Tensor) -> None:
    """Sets ``P = Q @ M.T`` for every matrix, after adding the residual to it.

    Args:
        flat: ``(n,)`` the bucket, float32 or float64; ``residual`` is added to its matrices in place.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        matrices: of the bucket.
        q: ``(sum of r * k,)``, of the dtype of ``flat``.
        p: ``(sum of r * m,)``, of the same dtype; overwritten.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.multiply_rows(flat, residual, matrices, q, p)
    for matrix, its_q, its_p in zip(matrices, views(q, q_shapes(matrices)), views(p, p_shapes(matrices)), strict=True):
        for rows, part in _corrected_rows(flat, residual, matrix):
            torch.mm(its_q, part.T, out=its_p[:, rows])
    return None


def multiply_columns(flat: Tensor, residual: Tensor | None, matrices: tuple[Matrix, ...], p: Tensor, q: Tensor) -> None:
    """Sets ``Q = P @ M`` for every matrix, after adding the residual to it.

    Args:
        flat: ``(n,)`` the bucket, float32 or float64; ``residual`` is added to its matrices in place.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        matrices: of the bucket.
        p: ``(sum of r * m,)``, of the dtype of ``flat``.
        q: ``(sum of r * k,)``, of the same dtype; overwritten.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.multiply_columns(flat, residual, matrices, p, q)
    q.zero_()
    for matrix, its_p, its_q in zip(matrices, views(p, p_shapes(matrices)), views(q, q_shapes(matrices)), strict=True):
        for rows, part in _corrected_rows(flat, residual, matrix):
            its_q.addmm_(its_p[:, rows], part)
    return None


def settle(
    flat: Tensor,
    residual: Tensor | None,
    matrices: tuple[Matrix, ...],
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    finite: Tensor,
) -> None:
    """Sets ``residual = M - P.T @ Q`` of this rank's factors, then ``M = P.T @ Q`` of the mean's.

    Args:
        flat: ``(n,)`` the bucket, with the residual added; its matrices are overwritten.
        residual: ``(n,)``, or None where it is not wanted; overwritten at the matrices.
        matrices: of the bucket.
        own: ``(sum of r * m,)`` and ``(sum of r * k,)``, the factors of this rank.
        mean: those of the average.
        finite: 0-dim bool; if it is false, ``residual`` stays and the matrices become NaN. On CUDA nobody waits for it.
    """
    if use_triton(flat):
        from lightning_commopt.kernels import low_rank_triton

        return low_rank_triton.settle(flat, residual, matrices, own, mean, finite)
    if not finite:
        for matrix in matrices:
            matrix.of(flat).fill_(torch.nan)
        return None
    own_ps, ps = (views(factors[0], p_shapes(matrices)) for factors in (own, mean))
    own_qs, qs = (views(factors[1], q_shapes(matrices)) for factors in (own, mean))
    for matrix, own_p, own_q, p, q in zip(matrices, own_ps, own_qs, ps, qs, strict=True):
        whole = matrix.of(flat)
        owed = None if residual is None else matrix.of(residual)
        for rows in _row_chunks(matrix):
            part = whole[rows]
            if owed is not None:
                _subtract_product(part, own_p[:, rows], own_q, out=owed[rows])
            _write_product(p[:, rows], q, out=part)
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


def _write_product(p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = p.T @ q``; from rank 2 to 4 one row of the factors after another is faster on CPU."""
    if not 1 < len(p) <= 4:
        torch.mm(p.T, q, out=out)
        return
    torch.mul(p[0].unsqueeze(1), q[0], out=out)
    for row_p, row_q in zip(p[1:], q[1:], strict=True):
        out.addcmul_(row_p.unsqueeze(1), row_q)
