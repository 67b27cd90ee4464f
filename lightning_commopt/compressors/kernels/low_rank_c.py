"""The operations of `low_rank` in C, for float32 on CPU; `low_rank` defines what they do."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.compressors.kernels.c_library import call
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, per_matrix
from lightning_commopt.compressors.kernels.low_rank import MAX_COLUMNS_ONE_BY_ONE


def fold_and_multiply(
    gradient: Tensor,
    residual: Tensor,
    parts: Parts,
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    """Sets ``residual += gradient - P Q^T`` with the factors ``sent``, and multiplies it."""
    for matrix, its_sent, (its_p, its_q) in per_matrix(parts, sent, (p, q)):
        name, factors = ("fold_rows", (its_q, its_p)) if by_rows else ("fold_columns", (its_p, its_q))
        _call(name, matrix, matrix.of(gradient), matrix.of(residual), *its_sent, *factors)


def multiply(flat: Tensor, parts: Parts, p: Tensor, q: Tensor, by_rows: bool) -> object:
    """Sets ``Q = M^T P``. The other product is as fast in plain torch."""
    if by_rows:
        return NotImplemented
    for matrix, (its_p, its_q) in per_matrix(parts, (p, q)):
        _call("multiply_columns", matrix, matrix.of(flat), its_p, its_q)
    return None


def subtract_product(flat: Tensor, parts: Parts, factors: tuple[Tensor, Tensor], out: Tensor, finite: Tensor) -> object:
    """Sets ``M -= P Q^T`` if ``finite``, in place only."""
    if out is not flat:
        return NotImplemented
    if finite.all():
        for matrix, (p, q) in per_matrix(parts, factors):
            _call("subtract_product", matrix, matrix.of(out), p, q)
    return None


def write_product(
    flat: Tensor,
    residual: Tensor | None,
    parts: Parts,
    factors: tuple[Tensor, Tensor],
    finite: Tensor,
) -> object:
    """Sets ``M = P Q^T`` if ``finite``, rounding each product and each sum, for factors of few columns."""
    if not finite or max(matrix.r for matrix in parts.matrices) > MAX_COLUMNS_ONE_BY_ONE:
        return NotImplemented
    for matrix, (p, q) in per_matrix(parts, factors):
        call("write_product", matrix.m, matrix.k, matrix.r, p, q, matrix.of(flat))
    return None


def _call(name: str, matrix: Matrix, *tensors: Tensor) -> None:
    if call(name, matrix.m, matrix.k, matrix.r, *tensors):
        raise MemoryError(f"no memory for the factors of {matrix.m} by {matrix.k} gradients, of rank {matrix.r}")
