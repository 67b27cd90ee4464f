"""PowerSGD: low-rank gradients by one step of power iteration, in two rounds.

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
from lightning_commopt.validation import check_switch

if TYPE_CHECKING:
    from lightning_commopt.collectives.channel import Channel


@register_compressor("low_rank")
@final
@dataclass(frozen=True, kw_only=True)
class LowRank(PowerIteration):
    """One step of power iteration for every matrix of the bucket, in two rounds.

    All ``P`` of a bucket travel in one message together with what is not compressed, all ``Q`` in a second one. See
    `PowerIteration` for the other settings, and for what is compressed.

    Attributes:
        warm_start: begin with the last step's ``Q``, so that the power iteration goes on from step to step; else
            with a new random one.

    Raises:
        ValueError: a setting is out of range.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithm 1. We also orthogonalise ``Q``, which changes no subspace. Beginning again
    now and then is PowerSGD+'s cure (Xie, Chen, Yuan, arXiv 2509.11254) for a subspace that misses the gradient; they
    take it from a singular value decomposition, we from a random matrix, as that costs nothing.
    """

    _steps_to_send_both: ClassVar[int] = 1

    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("warm_start", self.warm_start)

    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        shapes = self._cut(layout).q_shapes
        return {"q": self._random_factors(shapes, device, wide_dtype(layout.dtype), step)}

    def _starts_anew(self, step: int) -> bool:
        return not self.warm_start or super()._starts_anew(step)

    def _iterate(
        self, bucket: Tensor, parts: Parts, state: State, step: int, channel: Channel, residual: Tensor | None
    ) -> Rounds:
        """Averages ``P`` and the uncompressed gradients, then ``Q``."""
        gradients, q = FedBack(bucket, residual, parts.matrices, state), state["q"]
        num_p = sum(r * m for r, m in parts.p_shapes)
        message = bucket.new_empty(num_p + parts.num_others)
        gradients.multiply(message[:num_p], q, by_rows=True)
        take_others(bucket, residual, parts, message[num_p:])
        yield channel.all_reduce(message.mul_(1 / channel.size))
        finite = all_finite(message)
        p = orthonormalize(message[:num_p], parts.p_shapes, None, self.epsilon, finite)

        own_q = torch.empty_like(q)
        gradients.multiply(p, own_q, by_rows=False)
        mean_q = own_q * (1 / channel.size)
        yield channel.all_reduce(mean_q)
        finite = finite & all_finite(mean_q)

        gradients.replace((p, own_q), (p, mean_q), finite)
        put_others(bucket, residual, parts, message[num_p:], finite)
        state["q"] = orthonormalize(mean_q, parts.q_shapes, q, self.epsilon, finite)


@register_compressor("powersgd")
@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Composed):
    """PowerSGD as it is used: `LowRank` with `ErrorFeedback`, `AfterSteps` of exact averages.

    Attributes:
        matrix_rank: columns of the factors, ``r``; more is more exact and sends more.
        start_step: exchanges that are made uncompressed first.
        min_compression_rate: a matrix of ``(m, k)`` is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        error_feedback: send later what a step dropped. Without it the gradient is biased.
        residual_dtype: of what is sent later, "float32" or "bfloat16".
        warm_start: reuse the last step's ``Q``.
        refresh_steps: exchanges after which ``Q`` becomes random again; None for never.
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
    residual_dtype: str = "float32"
    warm_start: bool = True
    refresh_steps: int | None = None
    epsilon: float = DEFAULT_EPSILON
    seed: int = 0

    def _compose(self) -> Compressor:
        algorithm = LowRank(**self._settings_for(LowRank))
        inner = with_feedback(algorithm, self.error_feedback, self.residual_dtype)
        return AfterSteps(inner=inner, start_step=self.start_step)
