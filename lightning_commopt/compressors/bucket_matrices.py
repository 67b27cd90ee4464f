"""The matrices of a bucket that low-rank compressors send as factors, and all that is sent as it is.

Shapes: as in `lightning_commopt.compressors.kernels.matrices`; ``n`` elements in a bucket.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lightning_commopt.compressors.base import Layout, State
from lightning_commopt.compressors.kernels.chunks import wide_dtype
from lightning_commopt.compressors.kernels.low_rank import subtract_product
from lightning_commopt.compressors.kernels.low_rank_rounds import compress, decompress, holds_sums
from lightning_commopt.compressors.kernels.matrices import Matrix, Parts, factors_numel


@lru_cache(maxsize=1024)
def cut(layout: Layout, matrix_rank: int, min_compression_rate: float) -> Parts:
    """Returns how to cut a bucket.

    Args:
        layout: of the bucket.
        matrix_rank: columns of the factors; a matrix with a shorter side gets as many as that side.
        min_compression_rate: ``m * k / (r * (m + k))`` from which on a matrix is compressed.
    """
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
    """The matrices ``M`` of one bucket in one step: its gradients plus the residual.

    A residual of the bucket's dtype holds these sums until the next step, and the state the factors of what was sent of
    them; see `lightning_commopt.compressors.kernels.low_rank_rounds`.

    Args:
        flat: ``(n,)`` the gradients; the arithmetic is in float32 at least.
        residual: ``(n,)``, or None.
        parts: of the bucket; at least one matrix.
        state: of the compressor.
    """

    def __init__(self, flat: Tensor, residual: Tensor | None, parts: Parts, state: State) -> None:
        self._flat = flat
        self._bucket = flat.to(wide_dtype(flat.dtype))  # itself, unless it is narrow
        self._residual = residual
        self._parts = parts
        self._state = state
        self._holds_sums = holds_sums(residual, self._bucket)

    def compress(self, factor: Tensor, scale: float, own: Tensor | None = None, by_rows: bool = True) -> Tensor:
        """Returns the first message: ``P = M Q`` of every matrix or ``Q = M^T P``, and the rest, times ``scale``.

        Args:
            factor: ``Q`` ``(sum of r * k,)`` if ``by_rows``, else ``P`` ``(sum of r * m,)``.
            scale: factor.
            own: gets the products without ``scale``, if anybody needs them.
            by_rows: whether rows of the matrices are summed up, or columns.
        """
        shapes = self._parts.p_shapes if by_rows else self._parts.q_shapes
        message = self._bucket.new_empty(factors_numel(shapes) + sum(self._parts.rest_numels))
        sent = self._sent() if self._holds_sums else None
        compress(self._bucket, self._residual, self._parts, sent, factor, message, own, scale, by_rows)
        return message

    def compress_transposed(self, p: Tensor, scale: float, own: Tensor) -> Tensor:
        """Returns the second message: ``Q = M^T P`` of every matrix times ``scale``.

        Args:
            p: ``(sum of r * m,)``.
            scale: factor.
            own: ``(sum of r * k,)``, gets the products without ``scale``.
        """
        sums = self._residual if self._holds_sums and self._residual is not None else self._bucket
        message = torch.empty_like(own)
        compress(sums, None, self._parts, None, p, message, own, scale, by_rows=False)
        return message

    def decompress(
        self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], message: Tensor, finite: Tensor
    ) -> None:
        """Replaces the gradients by their average, ``P Q^T`` and the rest, and updates the residual.

        Args:
            own: ``P`` ``(sum of r * m,)`` and ``Q`` ``(sum of r * k,)`` of what this rank has sent; used up.
            mean: ``P`` and ``Q`` of the average.
            message: the average of the first message.
            finite: whether the step was, see `low_rank_rounds`; if not, matrices become NaN, and the residual stays.
        """
        decompress(self._bucket, self._residual, self._parts, own, mean, message, finite)
        if self._holds_sums:
            self._state["sent"] = dict(zip("pq", own, strict=True))
        if self._bucket is not self._flat:
            self._flat.copy_(self._bucket)

    def _sent(self) -> tuple[Tensor, Tensor]:
        """Returns the factors of what was sent of the residual in the last step."""
        if "sent" in self._state:
            return self._state["sent"]["p"], self._state["sent"]["q"]
        num_p, num_q = (factors_numel(shapes) for shapes in (self._parts.p_shapes, self._parts.q_shapes))
        return self._bucket.new_zeros(num_p), self._bucket.new_zeros(num_q)


def flush(residual: Tensor, parts: Parts, state: State) -> None:
    """Completes the residual, if `BucketMatrices` has deferred that.

    Args:
        residual: ``(n,)``; overwritten at the matrices.
        parts: of the bucket.
        state: of the compressor.
    """
    if "sent" in state:
        sent = state["sent"]
        finite = torch.ones((), dtype=torch.bool, device=residual.device)
        subtract_product(residual, parts.matrices, (sent["p"], sent["q"]), residual, finite)
        for factors in sent.values():  # in place, for whoever has another dict with the same tensors
            factors.zero_()
