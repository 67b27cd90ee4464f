"""What low-rank compressors do to a bucket before and after a collective.

Shapes: as in `matrices`; ``n`` elements in a bucket. A message holds the factors of all matrices, and behind them what
is sent as it is, the rest.

Plain torch forms, made of the operations in `low_rank`. On CUDA a few kernels for the whole bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.compat.torch import foreach_copy_, foreach_mul_
from lightning_commopt.compressors.kernels.dispatch import also_in
from lightning_commopt.compressors.kernels.low_rank import fold_and_multiply, multiply, subtract_product, write_product
from lightning_commopt.compressors.kernels.matrices import Parts


def holds_sums(residual: Tensor | None, bucket: Tensor) -> bool:
    """Returns whether the residual keeps the sums until the next step, as `low_rank` describes it.

    One of another dtype would round them: then they are in the bucket, and the residual is updated at once.
    """
    return residual is not None and residual.dtype == bucket.dtype


@also_in("triton")
def compress(
    bucket: Tensor,
    residual: Tensor | None,
    parts: Parts,
    sent: tuple[Tensor, Tensor] | None,
    factor: Tensor,
    message: Tensor,
    own: Tensor | None,
    scale: float,
    by_rows: bool,
) -> None:
    """Sets ``message`` to ``scale`` times ``P = M Q`` of every matrix (or ``Q = M^T P``), and of the rest.

    ``M`` is a matrix of the bucket, plus its residual: these sums are in the residual afterwards if it `holds_sums`,
    else in the bucket.

    Args:
        bucket: ``(n,)`` float32 or float64.
        residual: ``(n,)`` of any floating-point dtype, or None for zeros.
        parts: of the bucket.
        sent: ``P`` and ``Q`` of what was sent of a residual that `holds_sums`; else None.
        factor: ``Q`` of all matrices if ``by_rows``, else ``P``; of the dtype of the bucket.
        message: factors and rest, of that dtype; overwritten. Without its end, the rest is not sent.
        own: factors, of that dtype: gets the products without ``scale``. None if nobody needs them.
        scale: factor.
        by_rows: whether rows of the matrices are summed up, or columns.
    """
    num_factors = sum(r * side for r, side in (parts.p_shapes if by_rows else parts.q_shapes))
    products = message[:num_factors] if own is None else own
    p, q = (products, factor) if by_rows else (factor, products)
    if sent is not None and residual is not None:
        fold_and_multiply(bucket, residual, parts.matrices, sent, p, q, by_rows)
    else:
        if residual is not None:
            for matrix in parts.matrices:
                matrix.of(bucket).add_(matrix.of(residual))
        multiply(bucket, parts.matrices, p, q, by_rows)
    if own is not None:
        message[:num_factors].copy_(own)
    if message.numel() > num_factors:
        torch.cat(parts.rest_of(bucket), out=message[num_factors:])
        if residual is not None:
            message[num_factors:].add_(torch.cat(parts.rest_of(residual)))
    message.mul_(scale)


@also_in("triton")
def decompress(
    bucket: Tensor,
    residual: Tensor | None,
    parts: Parts,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    message: Tensor,
    finite: Tensor,
) -> None:
    """Sets the matrices to ``P Q^T`` of the mean and the rest to that of the message; updates the residual.

    Args:
        bucket: ``(n,)`` as `compress` left it; overwritten.
        residual: ``(n,)`` as `compress` left it; its rest becomes zero, and its matrices hold what was not sent, or
            still sums if it `holds_sums`. As it was before `compress` if the step was not finite. None if there is
            none.
        parts: of the bucket.
        own: ``P`` and ``Q`` of what this rank has sent. If the step was not finite they become zero where the residual
            `holds_sums`, and are the caller's to keep.
        mean: ``P`` and ``Q`` of the average.
        message: the average of the message with the rest.
        finite: 0-dim bool, or ``(k,)`` bool of parts of the step; if any is false, matrices become NaN. On CUDA the
            host does not wait for it.
    """
    finite, folded = finite.all(), residual if holds_sums(residual, bucket) else None
    if folded is not None:
        for factor in own:
            factor.masked_fill_(~finite, 0)
    elif residual is not None:
        subtract_product(bucket, parts.matrices, own, residual, finite)
    if residual is not None and parts.rest:
        foreach_mul_(parts.rest_of(residual), (~finite).to(residual.dtype))  # it is always finite itself
    write_product(bucket, folded, parts.matrices, mean, finite)
    if parts.rest:
        rest = message[message.numel() - sum(parts.rest_numels) :]
        foreach_copy_(parts.rest_of(bucket), rest.split(parts.rest_numels))
