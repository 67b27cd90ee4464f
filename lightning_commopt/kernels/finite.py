"""Whether a message is finite, so that nothing of a bad step is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commopt.kernels.chunks import use_triton


def all_finite(values: Tensor) -> Tensor:
    """Returns whether there is no NaN and no infinity among ``values``; nobody waits for the device.

    Args:
        values: ``(n,)`` floating point, contiguous.

    Returns:
        0-dim bool, on the device of ``values``.
    """
    if use_triton(values):
        from lightning_commopt.kernels import finite_triton

        return finite_triton.all_finite(values)
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    # NaN is both extremes. On CPU isfinite().all() takes 30 times as long as this one pass.
    lowest, highest = torch.aminmax(values)
    return lowest.isfinite() & highest.isfinite()
