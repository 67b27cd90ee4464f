"""The matrices of a bucket that low-rank compressors send as factors, and all that is sent as it is.

Shapes: as in `lightning_commopt.compressors.kernels.matrices`; ``n`` elements in a bucket.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_, foreach_mul_
from lightning_commopt.compressors.base import Layout, State
from lightning_commopt.compressors.kernels.chunks import wide_dtype
from lightning_commopt.compressors.kernels.low_rank import fold_and_multiply, multiply, subtract_product, write_product
from lightning_commopt.compressors.kernels.matrices import Matrix, Shapes, factors_numel, p_shapes, q_shapes


class Parts(NamedTuple):
    """How a bucket is cut: matrices that are worth compressing, and the rest.

    Attributes:
        matrices: that are compressed.
        rest: begin and end of each stretch of the bucket that is sent as it is.
    """

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def rest_numels(self) -> list[int]:
        """Elements of each stretch that is sent as it is."""
        return [end - start for start, end in self.rest]

    @property
    def p_shapes(self) -> Shapes:
        """``(r, m)`` of each matrix."""
        return p_shapes(self.matrices)

    @property
    def q_shapes(self) -> Shapes:
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
    them; see `lightning_commopt.compressors.kernels.low_rank`. A residual of another dtype would round them: then they
    are in the bucket, and the residual is updated at once.

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
        self._in_residual = residual is not None and residual.dtype == self._bucket.dtype
        self._is_summed = False

    def new_message(self, shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a message, and the views of it for factors of these shapes and for the rest of the bucket."""
        num_factors, num_rest = factors_numel(shapes), sum(self._parts.rest_numels)
        message = self._bucket.new_empty(num_factors + num_rest)
        return message, message[:num_factors], message[num_factors:]

    def multiply(self, q: Tensor, out_p: Tensor) -> None:
        """Sets ``P = M Q`` for every matrix.

        Args:
            q: ``(sum of r * k,)``.
            out_p: ``(sum of r * m,)``, overwritten.
        """
        self._multiply(out_p, q, by_rows=True)

    def multiply_transposed(self, p: Tensor, out_q: Tensor) -> None:
        """Sets ``Q = M^T P`` for every matrix.

        Args:
            p: ``(sum of r * m,)``.
            out_q: ``(sum of r * k,)``, overwritten.
        """
        self._multiply(p, out_q, by_rows=False)

    def copy_rest(self, out: Tensor) -> None:
        """Copies what is not compressed, gradients plus residual, to ``out``."""
        if self._parts.rest:
            torch.cat(_stretches(self._bucket, self._parts), out=out)
            if self._residual is not None:
                out.add_(torch.cat(_stretches(self._residual, self._parts)))

    def update_residual(self, own: tuple[Tensor, Tensor], finite: Tensor) -> None:
        """Keeps ``M - P Q^T`` for the next step, and nothing of what was sent as it is.

        Args:
            own: ``P`` ``(sum of r * m,)`` and ``Q`` ``(sum of r * k,)`` of what this rank has sent.
            finite: 0-dim bool; if it is false, the residual stays.
        """
        if self._residual is None:
            return
        if self._in_residual:
            self._state["sent"] = {name: torch.where(finite, x, 0) for name, x in zip("pq", own, strict=True)}
        else:
            subtract_product(self._bucket, self._parts.matrices, own, self._residual, finite)
        if self._parts.rest:
            rest = _stretches(self._residual, self._parts)
            foreach_mul_(rest, (~finite).to(self._residual.dtype))  # it is always finite itself

    def decompress(self, mean: tuple[Tensor, Tensor], rest: Tensor, finite: Tensor) -> None:
        """Replaces the gradients by their average, ``P Q^T`` and the rest; to be called after `update_residual`.

        Args:
            mean: ``P`` ``(sum of r * m,)`` and ``Q`` ``(sum of r * k,)`` of the average.
            rest: the average of what was sent as it is.
            finite: 0-dim bool; if it is false, matrices become NaN.
        """
        folded = self._residual if self._in_residual else None
        write_product(self._bucket, folded, self._parts.matrices, mean, finite)
        if self._parts.rest:
            foreach_copy_(_stretches(self._bucket, self._parts), rest.split(self._parts.rest_numels))
        if self._bucket is not self._flat:
            self._flat.copy_(self._bucket)

    def _multiply(self, p: Tensor, q: Tensor, by_rows: bool) -> None:
        matrices, sums = self._parts.matrices, self._bucket
        if self._in_residual and self._residual is not None:
            sums = self._residual
        if self._is_summed:
            multiply(sums, matrices, p, q, by_rows)
            return
        self._is_summed = True
        if self._in_residual:
            fold_and_multiply(self._bucket, sums, matrices, self._sent(), p, q, by_rows)
            return
        if self._residual is not None:
            for matrix in matrices:
                matrix.of(sums).add_(matrix.of(self._residual))
        multiply(sums, matrices, p, q, by_rows)

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


def _stretches(flat: Tensor, parts: Parts) -> list[Tensor]:
    """Returns views of what is sent as it is."""
    return [flat[start:end] for start, end in parts.rest]
