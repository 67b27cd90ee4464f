"""What the two variants of PowerSGD share: settings, first factors, and the matrices of a bucket.

Shapes are those of `lightning_commopt.compressors.kernels.factors`; a bucket has ``n`` elements.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Claims, Compressor, Layout, State
from lightning_commopt.compressors.kernels.elementwise import wide_dtype
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, Shapes, factors_numel, orthonormal
from lightning_commopt.compressors.kernels.low_rank import compress, decompress, holds_sums, subtract_product
from lightning_commopt.compressors.wrappers import ErrorFeedback, Preset
from lightning_commopt.text.validation import check_integer, check_positive, warn_once

_MAX_SEED = 2**63
"""Upper limit of seeds. torch accepts seeds below 2**64, and the number of the step is added to the user's seed."""


@dataclass(frozen=True, kw_only=True)
class PowerIteration(Compressor):
    """Power iteration on every matrix of the bucket, which sends two thin factors instead of the matrix.

    A gradient of more than two dimensions is treated as a matrix: its outermost dimension in memory by all others.
    Vectors, and matrices that would not shrink enough, are sent uncompressed. It is lossy, and meant to be used within
    `ErrorFeedback`.

    The defaults of ``matrix_rank`` and ``min_compression_rate`` are those of torch's ``PowerSGDState``.

    Attributes:
        matrix_rank: number of columns of the factors, ``r``, at most the shorter side of the matrix. A larger rank is
            more exact and sends more.
        min_compression_rate: a matrix is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        refresh_steps: number of steps after which the iteration starts again from random factors; None for never.
        epsilon: with ``matrix_rank`` 1, added to the norm of a column when it is normalized, relative to that norm.
        seed: seed of the random factors, the same on all ranks.

    Raises:
        ValueError: a setting is out of range.
    """

    _steps_to_send_both: ClassVar[int]
    """Number of steps in which both factors are sent once."""

    matrix_rank: int = 1
    min_compression_rate: float = 2.0
    refresh_steps: int | None = None
    epsilon: float = 1e-12
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("matrix_rank", self.matrix_rank, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        if self.seed >= _MAX_SEED:
            raise ValueError(f"seed must be an integer below 2**63, got {self.seed!r}")
        if self.refresh_steps is not None:
            check_integer("refresh_steps", self.refresh_steps, at_least=1)
        check_positive("min_compression_rate", self.min_compression_rate)
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, Real) or not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon must be a finite number of at least 0, got {self.epsilon!r}")
        if self.matrix_rank > 1 and self.epsilon != PowerIteration.epsilon:
            warn_once(f"epsilon={self.epsilon!r} has no effect with matrix_rank={self.matrix_rank}")

    @property
    def claims(self) -> Claims:
        """The error bound is 1, since a low-rank subspace contains hardly anything of a random matrix."""
        return Claims(error_bound=1.0, has_c_kernels=True, is_part=True)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        self._warn_of_clamped_rank(layout)
        return {"step": step, **self._first_factors(layout, device, step)}

    def why_idle(self, layout: Layout) -> str | None:
        if self._cut(layout).matrices:
            return None
        return f"no gradient is a matrix that shrinks enough (min_compression_rate={self.min_compression_rate:g})"

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes per step on average; factors are at least float32."""
        parts, num_steps = self._cut(layout), self._steps_to_send_both
        if not parts.matrices:
            return UNCOMPRESSED.wire_bytes(layout, world_size)
        num_factors, num_rest = factors_numel(parts.p_shapes + parts.q_shapes), sum(parts.rest_numels)
        return (num_factors + num_steps * num_rest) * wide_dtype(layout.dtype).itemsize // num_steps

    def residual(self, layout: Layout, state: State, given: Tensor | None = None) -> Tensor | None:
        """Completes the residual if `BucketMatrices` has deferred its update."""
        if given is not None and "sent" in state:
            sent = state["sent"]
            finite = torch.ones((), dtype=torch.bool, device=given.device)
            subtract_product(given, self._cut(layout), (sent["p"], sent["q"]), given, finite)
            for factors in sent.values():
                factors.zero_()  # copies of the state share these tensors, so they are changed in place
        return given

    @abstractmethod
    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        """Returns the random first factors, by their names in the state."""

    def _begin_step(self, layout: Layout, device: torch.device, state: State) -> int:
        """Counts a step, and draws new random factors if that is due; returns the step's number, from 0."""
        step: int = state["step"]
        if step and self._resets_factors(step):
            state.update(self._first_factors(layout, device, step))
        state["step"] += 1
        return step

    def _resets_factors(self, step: int) -> bool:
        return self.refresh_steps is not None and step % self.refresh_steps == 0

    def _cut(self, layout: Layout) -> Parts:
        return _cut(layout, self.matrix_rank, self.min_compression_rate)

    def _warn_of_clamped_rank(self, layout: Layout) -> None:
        shortest = min((min(sides) for sides in layout.matrix_sides if min(sides) > 1), default=self.matrix_rank)
        if shortest < self.matrix_rank:
            warn_once(
                f"matrix_rank={self.matrix_rank} is larger than the shorter side of some matrices: those are"
                " compressed at full rank, or sent uncompressed where that is cheaper."
            )

    def _random_factors(self, shapes: Shapes, device: torch.device, dtype: torch.dtype, step: int) -> Tensor:
        """Returns factors with orthonormal columns, concatenated; the same on every rank."""
        # The CPU's generator gives the same numbers on every kind of machine.
        generator = torch.Generator().manual_seed(self.seed + step)
        # The dtype is explicit because torch's default dtype may have 16 bits, perhaps only within a `training_step`.
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        drawn = [torch.randn(shape, generator=generator, **options) for shape in shapes]
        columns = [orthonormal(x, x, self.epsilon).flatten() for x in drawn]
        factors = torch.cat([torch.empty(0, **options), *columns]).to(dtype)
        if device.type != "cuda":
            return factors.to(device)
        return factors.pin_memory().to(device, non_blocking=True)  # does not wait for the device


@dataclass(frozen=True, kw_only=True)
class PowerIterationPreset(Preset):
    """A power iteration within `ErrorFeedback`, after ``start_step`` uncompressed steps."""

    matrix_rank: int = PowerIteration.matrix_rank
    start_step: int = 0  # compresses from the first step on, whereas torch's hook waits for 1000 steps
    min_compression_rate: float = PowerIteration.min_compression_rate
    error_feedback: bool = True
    residual_dtype: str = ErrorFeedback.residual_dtype
    refresh_steps: int | None = PowerIteration.refresh_steps
    epsilon: float = PowerIteration.epsilon
    seed: int = PowerIteration.seed


@lru_cache(maxsize=1024)
def _cut(layout: Layout, matrix_rank: int, min_compression_rate: float) -> Parts:
    """Returns which matrices of a bucket are compressed, and the rest; see `PowerIteration` for the settings."""
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []
    for start, (m, k) in zip(layout.offsets, layout.matrix_sides, strict=True):
        r, end = min(matrix_rank, m, k), start + m * k
        if min(m, k) > 1 and m * k > min_compression_rate * r * (m + k):
            matrices.append(Matrix(start, m, k, r))
        elif rest and rest[-1][1] == start:
            rest[-1] = rest[-1][0], end
        else:
            rest.append((start, end))
    return Parts(tuple(matrices), tuple(rest))


class BucketMatrices:
    """The matrices ``M`` of one bucket in one step, which are its gradients plus the residual.

    A residual of the bucket's dtype holds these sums until the next step, while the state holds the factors of what was
    sent; see `lightning_commopt.compressors.kernels.low_rank`.

    Args:
        flat: ``(n,)`` the gradients; the arithmetic is at least in float32.
        residual: ``(n,)`` the residual, or None.
        parts: how the bucket is cut, with at least one matrix.
        state: state of the compressor.
    """

    def __init__(self, flat: Tensor, residual: Tensor | None, parts: Parts, state: State) -> None:
        self._flat = flat
        self._bucket = flat.to(wide_dtype(flat.dtype))  # this is ``flat`` itself unless its dtype is narrow
        self._residual = residual
        self._parts = parts
        self._state = state
        self._holds_sums = holds_sums(residual, self._bucket)

    def compress(self, factor: Tensor, scale: float, own: Tensor | None = None, by_rows: bool = True) -> Tensor:
        """Returns the first message: ``P = M Q`` of every matrix or ``Q = M^T P``, and the rest, times ``scale``.

        Args:
            factor: ``Q`` ``(sum of r * k,)`` if ``by_rows``, else ``P`` ``(sum of r * m,)``.
            scale: multiplies the message.
            own: receives the products without ``scale``; None if they are not needed.
            by_rows: whether rows of the matrices are summed up, or columns.
        """
        shapes = self._parts.p_shapes if by_rows else self._parts.q_shapes
        message = self._bucket.new_empty(factors_numel(shapes) + sum(self._parts.rest_numels))
        sent = self._sent() if self._holds_sums else None
        compress(self._bucket, self._residual, self._parts, sent, factor, message, own, scale, by_rows)
        return message

    def compress_transposed(self, p: Tensor, scale: float, own: Tensor) -> Tensor:
        """Returns the second message, ``Q = M^T P`` of every matrix times ``scale``, and ``Q`` itself in ``own``."""
        sums = self._residual if self._holds_sums and self._residual is not None else self._bucket
        message = torch.empty_like(own)
        compress(sums, None, self._parts, None, p, message, own, scale, by_rows=False)
        return message

    def decompress(
        self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], message: Tensor, finite: Tensor
    ) -> None:
        """Replaces the gradients by their average, ``P Q^T`` and the rest, and updates the residual.

        Args:
            own: ``P`` ``(sum of r * m,)`` and ``Q`` ``(sum of r * k,)`` of what this rank has sent; not to be used
                afterwards.
            mean: ``P`` and ``Q`` of the average.
            message: average of the first message.
            finite: whether the step was finite, see `decompress`. If not, matrices become NaN and the residual stays.
        """
        decompress(self._bucket, self._residual, self._parts, own, mean, message, finite)
        if self._holds_sums:
            self._state["sent"] = dict(zip("pq", own, strict=True))
        if self._bucket is not self._flat:
            self._flat.copy_(self._bucket)

    def _sent(self) -> tuple[Tensor, Tensor]:
        """Returns the factors that the last step has sent, whose product must still be subtracted from the residual."""
        if "sent" in self._state:
            return self._state["sent"]["p"], self._state["sent"]["q"]
        num_p, num_q = (factors_numel(shapes) for shapes in (self._parts.p_shapes, self._parts.q_shapes))
        return self._bucket.new_zeros(num_p), self._bucket.new_zeros(num_q)
