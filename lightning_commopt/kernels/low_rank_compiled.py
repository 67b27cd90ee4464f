"""The operations of `low_rank` in C, for float32 on CPU; what they do is defined there."""

from __future__ import annotations

from torch import Tensor

from lightning_commopt.kernels.compiled import call
from lightning_commopt.kernels.low_rank import Matrix, each


def fold(
    gradient: Tensor,
    residual: Tensor,
    matrices: tuple[Matrix, ...],
    sent: tuple[Tensor, Tensor],
    p: Tensor,
    q: Tensor,
    by_rows: bool,
) -> None:
    """Sets ``residual += gradient - P.T @ Q`` of ``sent``, and multiplies that."""
    for matrix, its_sent, (its_p, its_q) in each(matrices, sent, (p, q)):
        name, factors = ("fold_rows", (its_q, its_p)) if by_rows else ("fold_columns", (its_p, its_q))
        _call(name, matrix, matrix.of(gradient), matrix.of(residual), *its_sent, *factors)


def multiply_columns(flat: Tensor, matrices: tuple[Matrix, ...], p: Tensor, q: Tensor) -> None:
    """Sets ``Q = P @ M``."""
    for matrix, (its_p, its_q) in each(matrices, (p, q)):
        _call("multiply_columns", matrix, matrix.of(flat), its_p, its_q)


def subtract_product(matrices: tuple[Matrix, ...], factors: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Sets ``M -= P.T @ Q`` in ``out``."""
    for matrix, (p, q) in each(matrices, factors):
        _call("subtract_product", matrix, matrix.of(out), p, q)


def write_product(matrix: Matrix, p: Tensor, q: Tensor, out: Tensor) -> None:
    """Sets ``out = P.T @ Q`` of one matrix, each product and each sum rounded by itself."""
    call("write_product", matrix.m, matrix.k, matrix.r, p, q, out)


def _call(name: str, matrix: Matrix, *tensors: Tensor) -> None:
    if call(name, matrix.m, matrix.k, matrix.r, *tensors):
        raise MemoryError(f"no memory for the factors of {matrix.m} by {matrix.k} gradients, of rank {matrix.r}")
