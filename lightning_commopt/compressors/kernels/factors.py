"""Where the matrices of a bucket lie, how their thin factors are stored, and orthonormal bases of these.

Shapes: a matrix ``M`` ``(m, k)``, contiguous within the bucket; its factors ``P`` ``(m, r)`` and ``Q`` ``(k, r)``,
which stand for ``P Q^T``. Factors are stored column by column, as tensors ``(r, m)`` and ``(r, k)``. Those of all
matrices of a bucket are concatenated in one tensor: ``p`` ``(sum of r * m,)`` and ``q`` ``(sum of r * k,)``. A column
of a factor is a row ``(side,)`` of its tensor ``X`` ``(r, side)``; where bases are made, it is called so.

Row ``i`` of a basis is what is left of row ``i`` of ``X`` after the rows before it are projected out, with norm 1. A
row of which nothing is left, or so little that it has no digits left, is replaced by something orthonormal to the
others, so that no row ever dies.

Example: ``[[3, 4], [4, 3]]`` becomes ``[[0.6, 0.8], [0.8, -0.6]]``; ``[[3, 4], [6, 8]]`` becomes the same or
``[[0.6, 0.8], [-0.8, 0.6]]``.

Plain torch forms, which run on CPU. On CUDA bases take two fused kernels for all factors at once, three for many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_commopt.compressors.kernels.dispatch import also_in
from lightning_commopt.compressors.kernels.elementwise import all_finite

Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""Columns and rows of each factor, as it is stored."""


class Matrix(NamedTuple):
    """Where a matrix lies in its bucket, and how thin its factors are."""

    start: int  # its first element
    m: int  # rows
    k: int  # columns
    r: int  # columns of each of its factors

    def of(self, flat: Tensor) -> Tensor:
        """Returns the view ``(m, k)`` of a bucket."""
        return flat[self.start : self.start + self.m * self.k].view(self.m, self.k)


@dataclass(frozen=True, eq=False)
class Parts:
    """How a bucket is cut: matrices that are worth compressing, and the rest. Compared by identity, as a fast key."""

    matrices: tuple[Matrix, ...]  # that are compressed
    rest: tuple[tuple[int, int], ...] = ()  # begin and end of each stretch of the bucket that is sent as it is

    @cached_property
    def rest_numels(self) -> list[int]:
        """Elements of each stretch that is sent as it is."""
        return [end - start for start, end in self.rest]

    @cached_property
    def p_shapes(self) -> Shapes:
        """``(r, m)`` of each matrix."""
        return tuple((matrix.r, matrix.m) for matrix in self.matrices)

    @cached_property
    def q_shapes(self) -> Shapes:
        """``(r, k)`` of each matrix."""
        return tuple((matrix.r, matrix.k) for matrix in self.matrices)

    def rest_of(self, flat: Tensor) -> list[Tensor]:
        """Returns the views of a bucket that are sent as they are."""
        return [flat[start:end] for start, end in self.rest]


def factors_numel(shapes: Shapes) -> int:
    """Returns the elements of all factors."""
    return sum(r * side for r, side in shapes)


def views(factors: Tensor, shapes: Shapes) -> list[Tensor]:
    """Returns the view ``(r, side)`` of each factor."""
    parts = factors.split([r * side for r, side in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def per_matrix(parts: Parts, *pairs: tuple[Tensor, Tensor]) -> Iterator[tuple[Any, ...]]:
    """Gives each matrix with its views of pairs of factors, ``P`` and ``Q`` of all matrices."""
    ps, qs = parts.p_shapes, parts.q_shapes
    return zip(parts.matrices, *(zip(views(p, ps), views(q, qs), strict=True) for p, q in pairs), strict=True)


@also_in("triton")
def orthonormalize(
    message: Tensor, shapes: Shapes, old: Tensor | None, epsilon: float, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns an orthonormal basis of the rows of every factor, and whether the step has been finite so far.

    Args:
        message: float32 or float64; begins with the factors, ``(sum of r * side,)``. Left as it was.
        shapes: ``(r, side)`` of each factor, ``r <= side``.
        old: as the factors, orthonormal rows: the result if the step was not finite, and what rows are replaced by.
            None for zeros.
        epsilon: a single row gets the norm ``1 / (1 + epsilon)``.
        before: whether the step was finite before this message, as it is returned here. None if nothing was before.

    Returns:
        The basis, as the factors, and ``(k,)`` or 0-dim bool, all true if the whole message and what was ``before`` are
        finite. On CUDA the host does not wait for that.

        In float32 the scalar products of rows are exact to 1e-5, in most cases to 1e-6. The two forms agree to that if
        ``X`` is far from a lower rank; else they may replace rows differently. Plain torch replaces several rows
        without ``old``; on CUDA rows are replaced if less than 2**-16 of their norm is left, by old ones or zeros.
    """
    finite = all_finite(message).all() if before is None else all_finite(message).all() & before.all()
    x = message[: factors_numel(shapes)]
    old = torch.zeros_like(x) if old is None else old
    basis = torch.empty_like(x)
    usable = torch.where(finite, x, 0)
    for part, fallback, out in zip(views(usable, shapes), views(old, shapes), views(basis, shapes), strict=True):
        out.copy_(orthonormal(part, fallback, epsilon))
    return torch.where(finite, basis, old), finite


def orthonormal(x: Tensor, fallback: Tensor, epsilon: float) -> Tensor:
    """Returns an orthonormal basis of the rows of ``x`` ``(r, side)``; ``fallback`` for a single row of zeros.

    By QR instead of Gram-Schmidt, so that a matrix of a rank below ``r`` keeps all its rows in use.
    """
    if len(x) > 1:
        basis: Tensor
        basis, triangle = torch.linalg.qr(x.T)
        # Else rows could change sides from step to step.
        return basis.mul_(torch.copysign(x.new_ones(()), triangle.diagonal())).T
    x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)  # the square of a large number overflows
    norm = torch.linalg.vector_norm(x)
    return torch.where(norm > 0, x / (norm * (1 + epsilon)), fallback)
