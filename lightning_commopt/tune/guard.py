"""Guard: looks now and then whether a lossy compressor still averages one parameter's gradient well enough."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.base import as_real
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.buckets import synced_parameters

EVERY_STEPS = 200
"""Steps from one look to the next."""

_MAX_ELEMENTS = 2**16
_LEAST_LIMIT = 0.1
_NUM_BOUNDS = 4.0  # as many times further off than its class declares for normally distributed gradients
_STRIDE = 7  # from one sampled parameter to the next


def error_limit(compressor: Compressor) -> float:
    """Returns how far an average may be off, as a share of its 2-norm.

    A residual is part of what is sent, so one average may be further off than a compressor's bound.
    """
    bound = compressor.claims.error_bound
    return max(_LEAST_LIMIT, _NUM_BOUNDS * (1.0 if bound is None else bound))


class Guard:
    """Compares the averaged gradient of a parameter with the exact average, over all ranks.

    Args:
        strategy: for a Trainer, in a fit; its model is wrapped.
        group: of all ranks, over CPU.

    Attributes:
        error: of the last average that was looked at, as a share of the exact one's 2-norm; NaN before.
    """

    def __init__(self, strategy: Any, group: dist.ProcessGroup) -> None:
        self._strategy = strategy
        self._group = group
        self._num_steps = self._num_looks = 0
        self._parameter: Tensor | None = None
        self._local: Tensor | None = None
        self._handle: RemovableHandle | None = None
        self.error = math.nan

    def begin_step(self) -> None:
        """Must be called before a step's first batch, on all ranks."""
        if self._num_steps % EVERY_STEPS == 0:
            synced = synced_parameters(self._strategy.model)
            in_order = [parameter for parameter in self._strategy.model.parameters() if parameter in synced]
            self._parameter = in_order[_STRIDE * self._num_looks % len(in_order)]
            self._local = None
            self._handle = self._parameter.register_hook(self._add)
            self._num_looks += 1
        self._num_steps += 1

    def end_backward(self) -> None:
        """Must be called after every backward; looks at the gradient if it was synchronized. All ranks must call it."""
        if self._parameter is None or not self._strategy.model.require_backward_grad_sync:
            return
        parameter, local = self._parameter, self._local
        self.close()
        averaged = parameter.grad
        exact = torch.zeros(min(_MAX_ELEMENTS, as_real(parameter).numel()), dtype=torch.float64, device="cpu")
        if local is not None:
            exact += local
        with issued_by("plan='auto'"):
            dist.all_reduce(exact, group=self._group)
        exact /= dist.get_world_size(self._group)
        norm = float(exact.norm())
        if averaged is None or averaged.is_sparse or not 0 < norm < math.inf:
            return
        error = float((_head(averaged) - exact).norm()) / norm
        self.error = error if math.isfinite(error) else math.inf

    def close(self) -> None:
        """Stops looking at the present step."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._parameter = self._local = None

    def _add(self, gradient: Tensor) -> None:
        if not gradient.is_sparse:
            head = _head(gradient)
            self._local = head if self._local is None else self._local + head


def _head(gradient: Tensor) -> Tensor:
    return as_real(gradient.detach()).reshape(-1)[:_MAX_ELEMENTS].to("cpu", torch.float64)
