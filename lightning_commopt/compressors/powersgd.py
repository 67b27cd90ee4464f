"""PowerSGD: low-rank gradients by one step of power iteration, in two rounds.

Shapes: a gradient is a matrix ``M`` ``(m, k)``; its factors are ``P`` ``(m, r)`` and ``Q`` ``(k, r)``, stored column by
column. A tensor of factors is the concatenation over all matrices of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Claims, Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.elementwise import wide_dtype
from lightning_commopt.compressors.kernels.factors import orthonormal, orthonormalize, views
from lightning_commopt.compressors.power_iteration import BucketMatrices, PowerIteration, PowerIterationPreset
from lightning_commopt.compressors.registry import register_compressor
from lightning_commopt.text.validation import check_switch, warn_once


@register_compressor("low_rank")
@final
@dataclass(frozen=True, kw_only=True)
class LowRank(PowerIteration):
    """One step of power iteration for every matrix of the bucket, in two rounds.

    All ``P`` of a bucket are sent in one message together with what is not compressed, all ``Q`` in a second message.
    See `PowerIteration` for the other settings and for which gradients are compressed.

    This differs from algorithm 1 of Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, in: 1. ``Q`` is orthogonalized, too, which does not change the subspace.
    2. With ``refresh_steps`` the iteration starts again periodically, as in PowerSGD+ (Xie, Chen, Yuan, arXiv
    2509.11254), in case the subspace misses the gradient. They compute the new factors by a singular value
    decomposition; we draw them at random, which costs hardly anything.

    Attributes:
        warm_start: whether a step starts from the last step's ``Q``, so that the power iteration converges over steps,
            or from a new random one.

    Raises:
        ValueError: a setting is out of range.
    """

    _steps_to_send_both: ClassVar[int] = 1  # a step sends P and Q

    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("warm_start", self.warm_start)
        if not self.warm_start and self.refresh_steps is not None:
            warn_once(
                f"refresh_steps={self.refresh_steps} has no effect with warm_start=False: every step starts from random"
                " factors."
            )

    @property
    def claims(self) -> Claims:
        return replace(super().claims, is_recommended=True)

    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        shapes = self._cut(layout).q_shapes
        return {"q": self._random_factors(shapes, device, wide_dtype(layout.dtype), step)}

    def _resets_factors(self, step: int) -> bool:
        return not self.warm_start or super()._resets_factors(step)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages ``P`` and what is not compressed, then ``Q``; a bucket without matrices is averaged uncompressed."""
        parts = self._cut(layout)
        if not parts.matrices:
            return (yield from UNCOMPRESSED.rounds(flat, layout, {}, channel, residual))
        self._begin_step(layout, flat.device, state)
        matrices, old_q, scale = BucketMatrices(flat, residual, parts, state), state["q"], 1 / channel.size

        message = matrices.compress(old_q, scale)  # P = M Q
        yield channel.all_reduce(message)
        p, finite = orthonormalize(message, parts.p_shapes, None, self.epsilon)

        own_q = torch.empty_like(old_q)
        mean_q = matrices.compress_transposed(p, scale, own_q)  # Q = M^T P
        yield channel.all_reduce(mean_q)
        state["q"], finite = orthonormalize(mean_q, parts.q_shapes, old_q, self.epsilon, finite)

        matrices.decompress((p, own_q), (p, mean_q), message, finite)  # M = P Q^T
        return None

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Returns the average of ``shares`` ``(W, n)``, gradients plus residuals, and what each rank has sent."""
        parts, mean, sent, new_q = self._cut(layout), shares.mean(0), shares.clone(), []
        self._begin_step(layout, shares.device, state)
        for matrix, old_q in zip(parts.matrices, views(state["q"], parts.q_shapes), strict=True):
            p = orthonormal(old_q @ matrix.of(mean).T, old_q.new_zeros(matrix.r, matrix.m), self.epsilon)
            all_q = [p @ matrix.of(share) for share in shares]
            for q, sent_share in zip(all_q, sent, strict=True):
                matrix.of(sent_share).copy_(p.T @ q)
            mean_q = torch.stack(all_q).mean(0)
            matrix.of(mean).copy_(p.T @ mean_q)
            new_q.append(orthonormal(mean_q, old_q, self.epsilon).flatten())
        state["q"] = torch.cat(new_q)
        return mean, sent


@register_compressor("powersgd")
@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(PowerIterationPreset):
    """PowerSGD: `LowRank` within `ErrorFeedback`, after ``start_step`` uncompressed steps.

    Without error feedback the gradient is biased. The settings are described in `LowRank` and `Preset`.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithms 1 and 2.
    """

    algorithm: ClassVar[type[LowRank]] = LowRank

    warm_start: bool = LowRank.warm_start
