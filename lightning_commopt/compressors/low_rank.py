"""Low-rank gradients: what the two-round and the alternating power iteration share.

Shapes: a gradient as a matrix ``M`` ``(m, k)``; its factors, stored transposed, ``P`` ``(r, m)`` and ``Q`` ``(r, k)``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import AllReduce
from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.fed_back import flush
from lightning_commopt.kernels.chunks import wide_dtype
from lightning_commopt.kernels.low_rank import Matrix, p_shapes, q_shapes
from lightning_commopt.kernels.orthonormal import orthonormal
from lightning_commopt.validation import check_integer, warn, warn_once

if TYPE_CHECKING:
    from lightning_commopt.collectives.channel import Channel

DEFAULT_EPSILON = 1e-12

_UNCOMPRESSED = AllReduce()


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

    @property
    def num_factors(self) -> int:
        """Elements of all ``P`` and ``Q``."""
        return sum(rank * side for rank, side in [*self.p_shapes, *self.q_shapes])


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
    """Steps of a power iteration on every matrix of the bucket, whose factors travel instead of it.

    A gradient of more than two dimensions is a matrix of its outermost dimension in memory by the rest. Vectors, and
    matrices that would not shrink enough, are sent as they are. Lossy; meant to stand inside `ErrorFeedback`.

    Attributes:
        matrix_rank: columns of the factors, ``r``; a matrix with a shorter side gets as many as that side.
        min_compression_rate: a matrix is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        refresh_steps: exchanges after which the iteration begins again with random factors; None for never.
        epsilon: added to the norm of a column, in units of that norm, when it is normalised; for ``matrix_rank`` 1
            only.
        seed: of the random factors, the same on all ranks.

    Raises:
        ValueError: a setting is out of range.
    """

    _steps_to_send_both: ClassVar[int]
    """Gradient sync in which both factors travel once."""

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
            warn(f"epsilon={self.epsilon!r} has no effect with matrix_rank={self.matrix_rank}")

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the count of exchanges and random factors for every matrix."""
        self._say_what_is_clamped(layout)
        return {"step": step, **self._first_factors(layout, device, step)}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages factors and the uncompressed gradients; a bucket without matrices as it is."""
        parts, step = self._cut(layout), state["step"]
        if not parts.matrices:
            return (yield from _UNCOMPRESSED.rounds(flat, layout, {}, channel, residual))
        if step and self._starts_anew(step):
            state.update(self._first_factors(layout, flat.device, step))
        state["step"] += 1
        bucket = flat.to(wide_dtype(layout.dtype))  # itself, unless it is narrow
        yield from self._iterate(bucket, parts, state, step, channel, residual)
        if bucket is not flat:
            flat.copy_(bucket)
        return None

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes of a step on average, in float32 at least."""
        parts, num_steps = self._cut(layout), self._steps_to_send_both
        if not parts.matrices:
            return _UNCOMPRESSED.wire_bytes(layout, world_size)
        return (parts.num_factors + num_steps * parts.num_others) * wide_dtype(layout.dtype).itemsize // num_steps

    def flush(self, layout: Layout, state: State, residual: Tensor) -> None:
        """Subtracts what was sent of the matrices in the last exchange."""
        flush(residual, self._cut(layout).matrices, state)

    @abstractmethod
    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        """Returns the random factors to begin with, by their names in the state."""

    @abstractmethod
    def _iterate(
        self, bucket: Tensor, parts: Parts, state: State, step: int, channel: Channel, residual: Tensor | None
    ) -> Rounds:
        """Replaces a ``bucket`` ``(n,)`` in a wide dtype by its average, in exchange ``step``, counted from 0."""

    def _starts_anew(self, step: int) -> bool:
        return self.refresh_steps is not None and step % self.refresh_steps == 0

    def _cut(self, layout: Layout) -> Parts:
        return cut(layout, self.matrix_rank, self.min_compression_rate)

    def _say_what_is_clamped(self, layout: Layout) -> None:
        shortest = min((min(sides) for sides in layout.matrix_sides if min(sides) > 1), default=self.matrix_rank)
        if shortest < self.matrix_rank:
            warn_once(
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
