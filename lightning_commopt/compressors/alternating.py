"""Alternating power iteration (ACP-SGD): one round a step.

Shapes: a gradient as a matrix ``M`` ``(m, k)``; its factors, stored transposed, ``P`` ``(r, m)`` and ``Q`` ``(r, k)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.composed import Composed, with_feedback
from lightning_commopt.compressors.fed_back import FedBack
from lightning_commopt.compressors.low_rank import DEFAULT_EPSILON, Parts, PowerIteration, put_others, take_others
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.wrappers import AfterSteps
from lightning_commopt.kernels.chunks import wide_dtype
from lightning_commopt.kernels.finite import all_finite
from lightning_commopt.kernels.orthonormal import orthonormalize

if TYPE_CHECKING:
    from lightning_commopt.collectives.channel import Channel


@register_compressor("alternating_low_rank")
@final
@dataclass(frozen=True, kw_only=True)
class AlternatingLowRank(PowerIteration):
    """Half a step of power iteration for every matrix of the bucket: ``P`` in one step, ``Q`` in the next.

    The factor that is not sent is the orthonormal basis that came out of the step before, the same on all ranks. One
    message a step, half the arithmetic and about half the bytes of `LowRank`; the subspace follows the gradient half
    as fast. See `PowerIteration` for the settings, and for what is compressed.

    Source: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS
    2023, algorithm 2. For ``refresh_steps`` see `LowRank`.
    """

    _steps_to_send_both: ClassVar[int] = 2

    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        parts = self._cut(layout)
        both = self._random_factors(parts.p_shapes + parts.q_shapes, device, wide_dtype(layout.dtype), step)
        num_p = sum(r * m for r, m in parts.p_shapes)
        return {"p": both[:num_p].clone(), "q": both[num_p:].clone()}

    def _iterate(
        self, bucket: Tensor, parts: Parts, state: State, step: int, channel: Channel, residual: Tensor | None
    ) -> Rounds:
        """Averages ``P`` in even steps and ``Q`` in odd ones, with the uncompressed gradients."""
        sends_q = step % 2 == 1
        sent, kept, shapes = ("q", "p", parts.q_shapes) if sends_q else ("p", "q", parts.p_shapes)
        gradients = FedBack(bucket, residual, parts.matrices, state)

        def pair(factors: Tensor) -> tuple[Tensor, Tensor]:
            return (state[kept], factors) if sends_q else (factors, state[kept])

        num_factors = sum(r * side for r, side in shapes)
        message = bucket.new_empty(num_factors + parts.num_others)
        mean = message[:num_factors]
        p, q = pair(mean)
        gradients.multiply(p, q, by_rows=not sends_q)
        own = mean.clone()
        take_others(bucket, residual, parts, message[num_factors:])
        yield channel.all_reduce(message.mul_(1 / channel.size))
        finite = all_finite(message)

        gradients.replace(pair(own), pair(mean), finite)
        put_others(bucket, residual, parts, message[num_factors:], finite)
        state[sent] = orthonormalize(mean, shapes, state[sent], self.epsilon, finite)


@register_compressor("alternating_powersgd")
@final
@dataclass(frozen=True, kw_only=True)
class AlternatingPowerSGD(Composed):
    """Alternating PowerSGD as it is used: `AlternatingLowRank` with `ErrorFeedback`, `AfterSteps` of exact averages.

    Attributes:
        matrix_rank: columns of the factors, ``r``; more is more exact and sends more.
        start_step: exchanges that are made uncompressed first.
        min_compression_rate: a matrix of ``(m, k)`` is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        error_feedback: send later what a step dropped. Without it the gradient is biased.
        residual_dtype: of what is sent later, "float32" or "bfloat16".
        refresh_steps: exchanges after which the factors become random again; None for never.
        epsilon: added to the norm of a column when it is normalised (``matrix_rank`` 1 only).
        seed: of the random factors, the same on all ranks.

    Raises:
        ValueError: a setting is out of range.

    Source: see `AlternatingLowRank`.
    """

    matrix_rank: int = 1
    start_step: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    residual_dtype: str = "float32"
    refresh_steps: int | None = None
    epsilon: float = DEFAULT_EPSILON
    seed: int = 0

    def _compose(self) -> Compressor:
        algorithm = AlternatingLowRank(**self._settings_for(AlternatingLowRank))
        inner = with_feedback(algorithm, self.error_feedback, self.residual_dtype)
        return AfterSteps(inner=inner, start_step=self.start_step)
