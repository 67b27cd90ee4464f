"""The matrices of a bucket with what is owed of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.compressors.base import State
from lightning_commopt.kernels.low_rank import (
    Matrix,
    fold,
    multiply,
    p_shapes,
    q_shapes,
    subtract_product,
    write_product,
)


class FedBack:
    """The sums of a bucket's matrices and of their residual, in one exchange.

    A residual of the bucket's dtype holds these sums until the next exchange, and the state the factors of what was
    sent of them; see `lightning_commopt.kernels.low_rank`. A residual of another dtype would round them: then they are
    in the bucket, and what is owed is calculated at once.

    Args:
        bucket: ``(n,)`` the gradients, float32 or float64.
        residual: ``(n,)``, or None if nothing is owed.
        matrices: of the bucket.
        state: of the compressor.
    """

    def __init__(self, bucket: Tensor, residual: Tensor | None, matrices: tuple[Matrix, ...], state: State) -> None:
        self._bucket = bucket
        self._residual = residual
        self._matrices = matrices
        self._state = state
        self._in_residual = residual is not None and residual.dtype == bucket.dtype
        self._is_summed = False

    def multiply(self, p: Tensor, q: Tensor, by_rows: bool) -> None:
        """Sets ``P = Q @ M.T`` for every matrix if ``by_rows``, else ``Q = P @ M``.

        Args:
            p: ``(sum of r * m,)``.
            q: ``(sum of r * k,)``.
            by_rows: which of them is overwritten.
        """
        if self._must_fold():
            fold(self._bucket, self._sums, self._matrices, self._sent(), p, q, by_rows)
        else:
            multiply(self._sums, self._matrices, p, q, by_rows)

    def replace(self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], finite: Tensor) -> None:
        """Replaces the gradients by their average, and keeps what is owed.

        Args:
            own: ``(sum of r * m,)`` and ``(sum of r * k,)``, the factors of what this rank has sent.
            mean: those of the average.
            finite: 0-dim bool; if it is false, gradients become NaN, and what was owed before still is.
        """
        if self._in_residual:
            write_product(self._bucket, self._residual, self._matrices, mean, finite)
            self._state["sent"] = {name: torch.where(finite, x, 0) for name, x in zip("pq", own, strict=True)}
            return
        if self._residual is not None:
            subtract_product(self._bucket, self._matrices, own, self._residual, finite)
        write_product(self._bucket, None, self._matrices, mean, finite)

    @property
    def _sums(self) -> Tensor:
        return self._residual if self._in_residual and self._residual is not None else self._bucket

    def _must_fold(self) -> bool:
        """Returns whether the sums are to be made together with a product; makes them if they are made apart."""
        if self._is_summed:
            return False
        self._is_summed = True
        if not self._in_residual and self._residual is not None:
            for matrix in self._matrices:
                matrix.of(self._bucket).add_(matrix.of(self._residual))
        return self._in_residual

    def _sent(self) -> tuple[Tensor, Tensor]:
        if "sent" in self._state:
            return self._state["sent"]["p"], self._state["sent"]["q"]
        num_p, num_q = (sum(r * side for r, side in shapes(self._matrices)) for shapes in (p_shapes, q_shapes))
        return self._bucket.new_zeros(num_p), self._bucket.new_zeros(num_q)


def flush(residual: Tensor, matrices: tuple[Matrix, ...], state: State) -> None:
    """Calculates what is owed, if a `FedBack` has put that off.

    Args:
        residual: ``(n,)``; overwritten at the matrices.
        matrices: of the bucket.
        state: of the compressor.
    """
    if "sent" in state:
        sent = state["sent"]
        finite = torch.ones((), dtype=torch.bool, device=residual.device)
        subtract_product(residual, matrices, (sent["p"], sent["q"]), residual, finite)
        for factors in sent.values():  # in place, for whoever has another dict with the same tensors
            factors.zero_()
