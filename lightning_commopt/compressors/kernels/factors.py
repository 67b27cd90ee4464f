"""The matrices in a bucket, how their thin factors are stored, and orthonormal bases of the factors.

Shapes: a matrix ``M`` ``(m, k)`` is contiguous within the bucket. Its factors are ``P`` ``(m, r)`` and ``Q``
``(k, r)``, which represent ``P Q^T``. They are stored column by column, as tensors ``(r, m)`` and ``(r, k)``, and
concatenated over all matrices of a bucket: ``p`` ``(sum of r * m,)`` and ``q`` ``(sum of r * k,)``. So a column of a
factor is a row ``(side,)`` of its tensor ``X`` ``(r, side)``, and is called a row where bases are made.

Row ``i`` of a basis is row ``i`` of ``X`` with the earlier rows projected out, scaled to norm 1. If nothing of a row is
left, or so little that it has no correct digits, it is replaced by a row that is orthonormal to the others, so that no
row stays zero.

Example: ``[[3, 4], [4, 3]]`` becomes ``[[0.6, 0.8], [0.8, -0.6]]``; ``[[3, 4], [6, 8]]`` becomes the same or
``[[0.6, 0.8], [-0.8, 0.6]]``.

The plain torch forms run on CPU. On CUDA two fused kernels make the bases of all factors, or three for many rows.
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
"""Columns and rows of each factor, the shape in which it is stored."""


class Matrix(NamedTuple):
    """The place of a matrix in its bucket, its shape, and the number of columns of its factors."""

    start: int  # first element in the bucket
    m: int  # number of rows
    k: int  # number of columns
    r: int  # number of columns of each factor

    def of(self, flat: Tensor) -> Tensor:
        """Returns the view ``(m, k)`` of a bucket."""
        return flat[self.start : self.start + self.m * self.k].view(self.m, self.k)


@dataclass(frozen=True, eq=False)
class Parts:
    """How a bucket is cut into matrices that are compressed, and the rest. Compared by identity, to be a fast key."""

    matrices: tuple[Matrix, ...]  # the matrices to compress
    rest: tuple[tuple[int, int], ...] = ()  # begin and end of each part of the bucket that is sent uncompressed

    @cached_property
    def rest_numels(self) -> list[int]:
        """Number of elements of each part that is sent uncompressed."""
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
        """Returns views of the parts of a bucket that are sent uncompressed."""
        return [flat[start:end] for start, end in self.rest]


def factors_numel(shapes: Shapes) -> int:
    """Returns the number of elements of all factors."""
    return sum(r * side for r, side in shapes)


def views(factors: Tensor, shapes: Shapes) -> list[Tensor]:
    """Returns the view ``(r, side)`` of each factor."""
    parts = factors.split([r * side for r, side in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def per_matrix(parts: Parts, *pairs: tuple[Tensor, Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yields each matrix with its views of some pairs of factors, each pair ``P`` and ``Q`` of all matrices."""
    ps, qs = parts.p_shapes, parts.q_shapes
    return zip(parts.matrices, *(zip(views(p, ps), views(q, qs), strict=True) for p, q in pairs), strict=True)


@also_in("triton")
def orthonormalize(
    message: Tensor, shapes: Shapes, old: Tensor | None, epsilon: float, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns an orthonormal basis of the rows of every factor, and whether the step has been finite so far.

    Args:
        message: float32 or float64, not changed; its first ``(sum of r * side,)`` elements are the factors.
        shapes: ``(r, side)`` of each factor, ``r <= side``.
        old: orthonormal rows with the shapes of the factors, which are the result if the step was not finite, and from
            which rows are replaced. None for zeros.
        epsilon: a single row gets the norm ``1 / (1 + epsilon)``.
        before: the second result of an earlier call in the same step; None if there was none.

    Returns:
        The basis, with the shapes of the factors; and a ``(k,)`` or 0-dim bool tensor that is all true if the whole
        message and everything ``before`` are finite. On CUDA the host does not wait for it.

        In float32 the scalar products of rows are exact to 1e-5, in most cases to 1e-6. Plain torch and Triton agree to
        this precision if ``X`` is far from a lower rank; otherwise they may replace rows differently. Plain torch uses
        ``old`` only for a single row; Triton replaces a row by an old one, or by zeros, if less than 2**-16 of its norm
        is left.
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
    """Returns an orthonormal basis of the rows of ``x`` ``(r, side)``, or ``fallback`` for a single row of zeros.

    It uses QR instead of Gram-Schmidt, which gives ``r`` orthonormal rows even if the rank of ``x`` is lower.
    """
    if len(x) > 1:
        basis: Tensor
        basis, triangle = torch.linalg.qr(x.T)
        # QR leaves the signs of rows open; without this they could change from step to step.
        return basis.mul_(torch.copysign(x.new_ones(()), triangle.diagonal())).T
    x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)  # so that no square overflows
    norm = torch.linalg.vector_norm(x)
    return torch.where(norm > 0, x / (norm * (1 + epsilon)), fallback)
