"""Alternating power iteration (ACP-SGD), with one round per step.

Shapes are those of `powersgd`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_commopt.compressors.all_reduce import UNCOMPRESSED
from lightning_commopt.compressors.base import Layout, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels.elementwise import wide_dtype
from lightning_commopt.compressors.kernels.factors import factors_numel, orthonormal, orthonormalize, views
from lightning_commopt.compressors.power_iteration import BucketMatrices, PowerIteration, PowerIterationPreset
from lightning_commopt.compressors.registry import register_compressor


@register_compressor("alternating_low_rank")
@final
@dataclass(frozen=True, kw_only=True)
class AlternatingLowRank(PowerIteration):
    """Half a step of power iteration for every matrix of the bucket: ``P`` in one step, ``Q`` in the next.

    The factor that is not sent is the orthonormal basis of the previous step, which is the same on all ranks. A step
    needs one message, half the arithmetic and about half the bytes of `LowRank`, but the subspace follows the gradient
    half as fast. See `PowerIteration` for the settings and for which gradients are compressed.

    Source: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", ICDCS
    2023, algorithm 2. ``refresh_steps`` is an addition; see `LowRank`.
    """

    _steps_to_send_both: ClassVar[int] = 2  # a step sends P or Q

    def _first_factors(self, layout: Layout, device: torch.device, step: int) -> dict[str, Tensor]:
        parts = self._cut(layout)
        both = self._random_factors(parts.p_shapes + parts.q_shapes, device, wide_dtype(layout.dtype), step)
        num_p = factors_numel(parts.p_shapes)
        return {"p": both[:num_p].clone(), "q": both[num_p:].clone()}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        """Averages ``P`` in even steps, ``Q`` in odd ones, and in every step the gradients that are not compressed."""
        parts = self._cut(layout)
        if not parts.matrices:
            return (yield from UNCOMPRESSED.rounds(flat, layout, {}, channel, residual))
        sends_p = self._begin_step(layout, flat.device, state) % 2 == 0
        matrices = BucketMatrices(flat, residual, parts, state)
        sent, basis, shapes = ("p", state["q"], parts.p_shapes) if sends_p else ("q", state["p"], parts.q_shapes)

        own = torch.empty_like(state[sent])
        message = matrices.compress(basis, 1 / channel.size, own, by_rows=sends_p)  # P = M Q, or Q = M^T P
        yield channel.all_reduce(message)
        # The residual may be completed in the next step, when the state holds another basis.
        mean, old_basis = message[: own.numel()], basis.clone()
        state[sent], finite = orthonormalize(message, shapes, state[sent], self.epsilon)

        own_pair, mean_pair = ((own, old_basis), (mean, basis)) if sends_p else ((old_basis, own), (basis, mean))
        matrices.decompress(own_pair, mean_pair, message, finite)  # M = P Q^T
        return None

    def reference(self, shares: Tensor, layout: Layout, state: State) -> tuple[Tensor, Tensor]:
        """Returns the average of ``shares`` ``(W, n)``, gradients plus residuals, and what each rank has sent."""
        parts, mean, sent, new = self._cut(layout), shares.mean(0), shares.clone(), []
        name, other = ("p", "q") if self._begin_step(layout, shares.device, state) % 2 == 0 else ("q", "p")
        shapes = {"p": parts.p_shapes, "q": parts.q_shapes}
        old, bases = (views(state[factor], shapes[factor]) for factor in (name, other))
        for matrix, old_factor, basis in zip(parts.matrices, old, bases, strict=True):
            for flat in (mean, *sent):
                view = matrix.of(flat) if name == "q" else matrix.of(flat).T
                factor = basis @ view
                if flat is mean:
                    new.append(orthonormal(factor, old_factor, self.epsilon).flatten())
                view.copy_(basis.T @ factor)
        state[name] = torch.cat(new)
        return mean, sent


@register_compressor("alternating_powersgd")
@final
@dataclass(frozen=True, kw_only=True)
class AlternatingPowerSGD(PowerIterationPreset):
    """Alternating PowerSGD: `AlternatingLowRank` within `ErrorFeedback`, after ``start_step`` uncompressed steps.

    The settings are described in `PowerIteration` and `Preset`.

    Source: see `AlternatingLowRank`.
    """

    algorithm: ClassVar[type[AlternatingLowRank]] = AlternatingLowRank
