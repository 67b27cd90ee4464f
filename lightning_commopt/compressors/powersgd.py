"""PowerSGD: low-rank gradients by one step of power iteration.

Shapes: a gradient as a matrix ``M`` ``(m, k)``, its factors ``P`` ``(m, r)`` and ``Q`` ``(k, r)``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Averaged, Compressor, Layout, Rounds, State
from lightning_commopt.compressors.settings import check_integer, check_switch
from lightning_commopt.compressors.wrappers import AfterSteps, ErrorFeedback

if TYPE_CHECKING:
    from lightning_commopt.channel import Channel

_DEFAULT_EPSILON = 1e-12


@final
@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """One step of power iteration for every matrix of the bucket, in two rounds.

    All ``P`` of a bucket travel in one message together with what is not compressed (vectors, and matrices that
    would not shrink enough), all ``Q`` in a second one. A gradient of more than two dimensions is a matrix of its
    first dimension by the rest. Lossy; meant to stand inside `ErrorFeedback`.

    Attributes:
        matrix_rank: columns of the factors, ``r``.
        min_compression_rate: a matrix is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        warm_start: begin with the last step's ``Q``, so that the power iteration goes on from step to step; else
            with a new random one.
        epsilon: added to the norm of a column, in units of its largest element, when it is normalised; for
            ``matrix_rank`` 1 only, as a QR decomposition needs none.
        seed: of the random ``Q``, the same on all ranks.

    Raises:
        ValueError: a setting is out of range.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithm 1. We also orthogonalise ``Q``, which changes no subspace, and use
    QR instead of Gram-Schmidt, so that a matrix of a rank below ``r`` keeps all its columns in use.
    """

    matrix_rank: int = 1
    min_compression_rate: float = 2.0
    warm_start: bool = True
    epsilon: float = _DEFAULT_EPSILON
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("matrix_rank", self.matrix_rank, at_least=1)
        check_integer("seed", self.seed, at_least=0)
        check_switch("warm_start", self.warm_start)
        if not isinstance(self.min_compression_rate, Real) or not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be a number above 0, got {self.min_compression_rate!r}")
        if not isinstance(self.epsilon, Real) or not self.epsilon >= 0:
            raise ValueError(f"epsilon must be a number of at least 0, got {self.epsilon!r}")
        if self.matrix_rank > 1 and self.epsilon != _DEFAULT_EPSILON:
            warnings.warn(f"epsilon={self.epsilon!r} has no effect with matrix_rank={self.matrix_rank}", stacklevel=3)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the count of exchanges and a random ``Q`` for every matrix."""
        return {"step": step, "qs": self._random_qs(layout, device, step)}

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Averages ``P`` and the uncompressed gradients, then ``Q``."""
        scale = 1 / channel.size
        is_matrix = _matrix_mask(layout, self.matrix_rank, self.min_compression_rate)
        parts = layout.split(flat)
        wide = _wide_dtype(layout)
        matrices = [_as_matrix(part).to(wide) for part, yes in zip(parts, is_matrix, strict=True) if yes]
        others = [part.reshape(-1) for part, yes in zip(parts, is_matrix, strict=True) if not yes]
        if not matrices:
            return Averaged((yield channel.all_reduce(flat.mul_(scale))), own=None)

        if not self.warm_start and state["step"]:
            state["qs"] = self._random_qs(layout, flat.device, state["step"])
        state["step"] += 1
        old_qs = state["qs"]
        ps = [matrix @ q for matrix, q in zip(matrices, old_qs, strict=True)]
        message = yield channel.all_reduce(torch.cat([x.reshape(-1).to(wide) for x in ps + others]).mul_(scale))
        received = message.split([x.numel() for x in ps + others])
        finite = message.isfinite().all()
        ps = [
            self._orthonormal(torch.where(finite, mean, 0).view_as(p), torch.zeros_like(p))
            for mean, p in zip(received, ps, strict=False)
        ]
        other_means = received[len(ps) :]

        own_qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        message = yield channel.all_reduce(torch.cat([q.reshape(-1) for q in own_qs]).mul_(scale))
        qs = [x.view_as(q) for x, q in zip(message.split([q.numel() for q in own_qs]), own_qs, strict=True)]
        finite = finite & message.isfinite().all()
        state["qs"] = [
            torch.where(finite, self._orthonormal(torch.where(finite, q, 0), old), old)
            for q, old in zip(qs, old_qs, strict=True)
        ]

        # Every matrix turns into NaN if one message was not finite, so that all ranks know.
        mean = _decode(flat, layout, is_matrix, [torch.where(finite, p, torch.nan) for p in ps], qs, other_means)
        return Averaged(mean, lambda: _decode(flat, layout, is_matrix, ps, own_qs, others))

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns the bytes of the factors and of what is not compressed, in float32 at least."""
        is_matrix = _matrix_mask(layout, self.matrix_rank, self.min_compression_rate)
        if not any(is_matrix):
            return layout.numel * layout.dtype.itemsize
        sent = 0
        for shape, yes in zip(layout.shapes, is_matrix, strict=True):
            m, k = _matrix_sides(shape)
            sent += min(self.matrix_rank, m, k) * (m + k) if yes else shape.numel()
        return sent * _wide_dtype(layout).itemsize

    def _random_qs(self, layout: Layout, device: torch.device, step: int) -> list[Tensor]:
        # Drawn on the CPU, whose generator gives the same numbers on every kind of machine.
        generator = torch.Generator().manual_seed(self.seed + step)
        is_matrix = _matrix_mask(layout, self.matrix_rank, self.min_compression_rate)
        qs = []
        for shape, yes in zip(layout.shapes, is_matrix, strict=True):
            if yes:
                m, k = _matrix_sides(shape)
                q = torch.randn(k, min(self.matrix_rank, m, k), generator=generator)
                qs.append(self._orthonormal(q, q).to(device, _wide_dtype(layout)))
        return qs

    def _orthonormal(self, x: Tensor, fallback: Tensor) -> Tensor:
        """Returns an orthonormal basis of the columns of ``x``; ``fallback`` for a single column of zeros."""
        if x.shape[1] > 1:
            return torch.linalg.qr(x).Q
        x = x / x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)  # the square of a large number overflows
        norm = torch.linalg.vector_norm(x)
        return torch.where(norm > 0, x / (norm + self.epsilon), fallback)


@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """PowerSGD as it is used: `LowRank` with `ErrorFeedback`, `AfterSteps` of exact averages.

    Attributes:
        matrix_rank: columns of the factors, ``r``; more is more exact and sends more.
        start_step: exchanges that are made uncompressed first.
        min_compression_rate: a matrix of ``(m, k)`` is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        error_feedback: send later what a step dropped. Without it the gradient is biased.
        warm_start: reuse the last step's ``Q``.
        epsilon: added to the norm of a column when it is normalised (``matrix_rank`` 1 only).
        seed: of the random ``Q``, the same on all ranks.

    Raises:
        ValueError: a setting is out of range.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithms 1 and 2.
    """

    matrix_rank: int = 1
    start_step: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    epsilon: float = _DEFAULT_EPSILON
    seed: int = 0

    def __post_init__(self) -> None:
        check_switch("error_feedback", self.error_feedback)
        self.composed  # noqa: B018 - builds the parts, which check their settings

    @cached_property
    def composed(self) -> Compressor:
        """The wrappers and the algorithm that these settings stand for."""
        inner: Compressor = LowRank(
            matrix_rank=self.matrix_rank,
            min_compression_rate=self.min_compression_rate,
            warm_start=self.warm_start,
            epsilon=self.epsilon,
            seed=self.seed,
        )
        if self.error_feedback:
            inner = ErrorFeedback(inner=inner)
        return AfterSteps(inner=inner, start_step=self.start_step)

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        """Returns the state of the composition."""
        return self.composed.init(layout, device, step)

    def rounds(self, flat: Tensor, layout: Layout, state: State, channel: Channel) -> Rounds:
        """Runs the rounds of the composition."""
        return (yield from self.composed.rounds(flat, layout, state, channel))

    def wire_bytes(self, layout: Layout, world_size: int) -> int:
        """Returns what is sent once the compression has started."""
        return self.composed.wire_bytes(layout, world_size)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """Returns the residual of the error feedback, if there is one."""
        return self.composed.residual(layout, state)

    def take_over(self, layout: Layout, state: State, owed: Tensor) -> bool:
        """Adds what is owed to the residual of the error feedback, if there is one."""
        return self.composed.take_over(layout, state, owed)


def _matrix_sides(shape: torch.Size) -> tuple[int, int]:
    if len(shape) < 2 or not shape.numel():
        return shape.numel(), 1
    return shape[0], shape.numel() // shape[0]


def _wide_dtype(layout: Layout) -> torch.dtype:
    """Returns the dtype of the factors: QR decompositions and products of half floats lose too much."""
    return torch.promote_types(layout.dtype, torch.float32)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(_matrix_sides(x.shape))


@lru_cache(maxsize=1024)
def _matrix_mask(layout: Layout, matrix_rank: int, min_compression_rate: float) -> tuple[bool, ...]:
    """Returns for each gradient of the bucket whether it is worth compressing."""
    mask = []
    for shape in layout.shapes:
        m, k = _matrix_sides(shape)
        mask.append(min(m, k) > 1 and m * k > min_compression_rate * min(matrix_rank, m, k) * (m + k))
    return tuple(mask)


def _decode(
    flat: Tensor,
    layout: Layout,
    is_matrix: tuple[bool, ...],
    ps: list[Tensor],
    qs: list[Tensor],
    others: list[Tensor] | tuple[Tensor, ...],
) -> Tensor:
    """Returns ``(n,)`` the bucket that the factors and the uncompressed gradients stand for."""
    decoded = torch.empty_like(flat)
    factors, rest = iter(zip(ps, qs, strict=True)), iter(others)
    for part, yes in zip(layout.split(decoded), is_matrix, strict=True):
        if yes:
            p, q = next(factors)
            part.copy_((p @ q.T).view(part.shape))
        else:
            part.copy_(next(rest).view(part.shape))
    return decoded
