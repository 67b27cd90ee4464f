"""Where the matrices of a bucket lie, and how their thin factors are stored.

Shapes: a matrix ``M`` ``(m, k)``, contiguous within the bucket; its factors ``P`` ``(m, r)`` and ``Q`` ``(k, r)``,
which stand for ``P Q^T``. Factors are stored column by column, as tensors ``(r, m)`` and ``(r, k)``. Those of all
matrices of a bucket are concatenated in one tensor: ``p`` ``(sum of r * m,)`` and ``q`` ``(sum of r * k,)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""Columns and rows of each factor, as it is stored."""


class Matrix(NamedTuple):
    """Where a matrix lies in its bucket, and how thin its factors are.

    Attributes:
        start: its first element.
        m: rows.
        k: columns.
        r: columns of each of its factors.
    """

    start: int
    m: int
    k: int
    r: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the view ``(m, k)`` of a bucket."""
        return flat[self.start : self.start + self.m * self.k].view(self.m, self.k)


@dataclass(frozen=True, eq=False)
class Parts:
    """How a bucket is cut: matrices that are worth compressing, and the rest. Compared by identity, as a fast key.

    Attributes:
        matrices: that are compressed.
        rest: begin and end of each stretch of the bucket that is sent as it is.
    """

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...] = ()

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
