"""PowerSGD: low-rank gradients by one step of power iteration, in two rounds.

Shapes: a gradient as a matrix ``M`` ``(m, k)``; its factors ``P`` ``(m, r)`` and ``Q`` ``(k, r)``, which are stored
column by column. A tensor of factors holds those of all matrices of a bucket, one behind another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.bucket_matrices import BucketMatrices
from lightning_commopt.compressors.kernels.chunks import wide_dtype
from lightning_commopt.compressors.kernels.finite import all_finite
from lightning_commopt.compressors.kernels.orthonormal import orthonormalize
from lightning_commopt.compressors.power_iteration import DEFAULT_EPSILON, PowerIteration
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.compressors.wrappers import AfterSteps, Preset, with_feedback
from lightning_commopt.text.validation import check_switch

if TYPE_CHECKING:
    from lightning_commopt.compressors.channel import Channel


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

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages ``P`` and what is not compressed, then ``Q``; a bucket without matrices as it is."""
        parts = self._cut(layout)
        if not parts.matrices:
            return (yield from UNCOMPRESSED.rounds(flat, layout, {}, channel, residual))
        self._begin_step(layout, flat.device, state)
        matrices, old_q = BucketMatrices(flat, residual, parts, state), state["q"]

        message, p, rest = matrices.new_message(parts.p_shapes)
        matrices.multiply(old_q, out_p=p)  # P = M Q
        matrices.copy_rest(out=rest)
        yield channel.all_reduce(message.mul_(1 / channel.size))
        finite = all_finite(message)
        p = orthonormalize(p, parts.p_shapes, None, self.epsilon, finite)

        own_q = torch.empty_like(old_q)
        matrices.multiply_transposed(p, out_q=own_q)  # Q = M^T P
        mean_q = own_q * (1 / channel.size)
        yield channel.all_reduce(mean_q)
        finite = finite & all_finite(mean_q)

        matrices.update_residual((p, own_q), finite)
        matrices.decompress((p, mean_q), rest, finite)  # M = P Q^T
        state["q"] = orthonormalize(mean_q, parts.q_shapes, old_q, self.epsilon, finite)
        return None


@register_compressor("powersgd")
@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Preset):
    """PowerSGD as it is used: `LowRank` with `ErrorFeedback`, `AfterSteps` of exact averages.

    Attributes:
        matrix_rank: columns of the factors, ``r``; more is more exact and sends more.
        start_step: steps that are made uncompressed first.
        min_compression_rate: a matrix of ``(m, k)`` is compressed if ``m * k > min_compression_rate * r * (m + k)``.
        error_feedback: send later what a step dropped. Without it the gradient is biased.
        residual_dtype: of what is sent later, "float32" or "bfloat16".
        warm_start: reuse the last step's ``Q``.
        refresh_steps: steps after which ``Q`` becomes random again; None for never.
        epsilon: added to the norm of a column when it is normalized (``matrix_rank`` 1 only).
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

    def _build(self) -> Compressor:
        algorithm = LowRank(**self._settings_for(LowRank))
        inner = with_feedback(algorithm, self.error_feedback, self.residual_dtype)
        return AfterSteps(inner=inner, start_step=self.start_step)
