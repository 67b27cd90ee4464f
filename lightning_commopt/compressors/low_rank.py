"""Low-rank gradients: what the two-round and the alternating power iteration share.

Shapes: a gradient as a matrix ``M`` ``(m, k)``; its factors, stored transposed, ``P`` ``(r, m)`` and ``Q`` ``(r, k)``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Compressor, Layout
from lightning_commopt.compressors.settings import check_integer, say_once
from lightning_commopt.kernels.low_rank import Matrix, p_shapes, q_shapes
from lightning_commopt.kernels.orthonormal import orthonormal

DEFAULT_EPSILON = 1e-12


class Parts(NamedTuple):
    """How a bucket is cut: matrices that are worth compressing, and the rest.

    Attributes:
        matrices: that are compressed.
        others: begin and end of each stretch of the bucket that is sent as it is.
    """

    matrices: tuple[Matrix, ...]
    others: tuple[tuple[int, int], ...]

    @property
    def sizes_of_others(self) -> list[int]:
        """Elements of each stretch that is sent as it is."""
        return [end - start for start, end in self.others]

    @property
    def num_others(self) -> int:
        """Elements that are sent as they are."""
        return sum(self.sizes_of_others)

    @property
    def p_shapes(self) -> tuple[tuple[int, int], ...]:
        """``(r, m)`` of each matrix."""
        return p_shapes(self.matrices)

    @property
    def q_shapes(self) -> tuple[tuple[int, int], ...]:
        """``(r, k)`` of each matrix."""
        return q_shapes(self.matrices)


@lru_cache(maxsize=1024)
def cut(layout: Layout, matrix_rank: int, min_compression_rate: float) -> Parts:
    """Returns how to cut a bucket.

    Args:
        layout: of the bucket.
        matrix_rank: columns of the factors; a matrix with a shorter side gets as many as that side.
        min_compression_rate: ``m * k / (r * (m + k))`` from which on a matrix is compressed.
    """
    matrices: list[Matrix] = []
    others: list[tuple[int, int]] = []
    for start, (m, k) in zip(layout.offsets, layout.matrix_sides, strict=True):
        rank, end = min(matrix_rank, m, k), start + m * k
        if min(m, k) > 1 and m * k > min_compression_rate * rank * (m + k):
            matrices.append(Matrix(start, m, k, rank))
        elif others and others[-1][1] == start:
            others[-1] = others[-1][0], end
        else:
            others.append((start, end))
    return Parts(tuple(matrices), tuple(others))


@dataclass(frozen=True, kw_only=True)
class PowerIteration(Compressor):
    """Settings and steps of a power iteration on every matrix of the bucket.

    Attributes:
        matrix_rank: columns of the factors, ``r``; a matrix with a shorter side gets as many as that side.
        min_compression_rate: a matrix is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        refresh_steps: exchanges after which the iteration begins again with random factors; None for never.
        epsilon: added to the norm of a column, in units of that norm, when it is normalised; for ``matrix_rank`` 1
            only.
        seed: of the random factors, the same on all ranks.
    """

    matrix_rank: int = 1
    min_compression_rate: float = 2.0
    refresh_steps: int | None = None
    epsilon: float = DEFAULT_EPSILON
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("matrix_rank", self.matrix_rank, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        if self.refresh_steps is not None:
            check_integer("refresh_steps", self.refresh_steps, at_least=1)
        if not isinstance(self.min_compression_rate, Real) or not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be a number above 0, got {self.min_compression_rate!r}")
        if not isinstance(self.epsilon, Real) or not self.epsilon >= 0:
            raise ValueError(f"epsilon must be a number of at least 0, got {self.epsilon!r}")
        if self.matrix_rank > 1 and self.epsilon != DEFAULT_EPSILON:
            warnings.warn(f"epsilon={self.epsilon!r} has no effect with matrix_rank={self.matrix_rank}", stacklevel=3)

    def _cut(self, layout: Layout) -> Parts:
        return cut(layout, self.matrix_rank, self.min_compression_rate)

    def _say_what_is_clamped(self, layout: Layout) -> None:
        shortest = min((min(sides) for sides in layout.matrix_sides if min(sides) > 1), default=self.matrix_rank)
        if shortest < self.matrix_rank:
            say_once(
                f"matrix_rank={self.matrix_rank} is larger than the shorter side of some matrices: they count as ones"
                " of full rank, and are sent as they are where that is cheaper."
            )

    def _random_factors(
        self, shapes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype, step: int
    ) -> Tensor:
        """Returns factors with orthonormal rows, one behind another; the same on every rank."""
        # Drawn on the CPU, whose generator gives the same numbers on every kind of machine.
        generator = torch.Generator().manual_seed(self.seed + step)
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        rows = [orthonormal(x, x, self.epsilon).flatten() for x in drawn]
        factors = torch.cat([torch.empty(0), *rows]).to(dtype)
        if device.type != "cuda":
            return factors.to(device)
        return factors.pin_memory().to(device, non_blocking=True)  # no wait for the device


def take_others(flat: Tensor, residual: Tensor | None, parts: Parts, out: Tensor) -> None:
    """Copies what is not compressed, with what is owed of it, to ``out`` ``(num_others,)``."""
    if parts.others:
        torch.cat([flat[start:end] for start, end in parts.others], out=out)
        if residual is not None:
            out.add_(torch.cat([residual[start:end] for start, end in parts.others]))


def put_others(flat: Tensor, residual: Tensor | None, parts: Parts, means: Tensor, finite: Tensor) -> None:
    """Writes the averages of what is not compressed; nothing of it is owed after a finite step."""
    if not parts.others:
        return
    torch._foreach_copy_([flat[start:end] for start, end in parts.others], means.split(parts.sizes_of_others))
    if residual is not None:
        owed = [residual[start:end] for start, end in parts.others]
        torch._foreach_mul_(owed, (~finite).to(residual.dtype))  # it is always finite itself
