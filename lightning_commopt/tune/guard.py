"""Guard: checks periodically whether a lossy compressor still averages the gradients of a bucket well enough."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import bucket_parameters, refresh_bucket_parameters
from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.base import as_real
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.ddp.buckets import synced_parameters

EVERY_STEPS = 200
"""Number of steps from the beginning of a look to the next one. Eight of them, 4 %, wait for the device."""

_WINDOWS = (range(4), range(24, 28))
"""The steps of a look, counted from its beginning. Twenty steps lie between the two windows, in which a compressor
sends what a single large gradient has left in its residual."""

_MAX_ELEMENTS = 2**13
"""Maximum number of elements of a bucket in a look, 64 KiB as float64. The sum of 8192 squares of normal values varies
by 1.6 %, which is little compared with the limits."""

_MIN_LIMIT = 0.1
"""Averages may always be off by 10 % of their norm, whatever a class declares: gradients are noisier than that."""

_NUM_BOUNDS = 4.0
"""Tolerated multiple of the error that a class declares, which is for normally distributed gradients. A judgement: real
ones have longer tails, and residuals add what was left before."""

_STRIDE = 7
"""Distance between the buckets of two successive looks. Few models have a multiple of 7 buckets, so each bucket gets
its turn, and neighbours, which are similar, are not checked in succession."""


def error_limit(compressor: Compressor) -> float:
    """Returns how far averages may be off, as a share of their 2-norm.

    A residual is part of what is sent, so one average may be further off than a compressor's bound.
    """
    bound = compressor.claims.error_bound
    return max(_MIN_LIMIT, _NUM_BOUNDS * (1.0 if bound is None else bound))


class Guard:
    """Compares some averaged gradients of a bucket with their exact averages over all ranks.

    Errors are those of a bucket, since a parameter with small gradients may share the scale of large ones beside it.
    The compared elements are spread evenly over the bucket. A look has two windows of steps, and the better one counts.

    Args:
        model: returns the wrapper.
        group: all ranks, over CPU.

    Attributes:
        error: 2-norm of the error over the 2-norm of the exact averages in the last look; NaN before the first.
    """

    def __init__(self, model: Callable[[], DistributedDataParallel], group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._num_steps = self._num_looks = 0
        self._bucket: list[Tensor] = []
        self._places: list[slice] = []
        self._local: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._squared_error = self._squared_norm = 0.0
        self._shares: list[float] = []
        self.error = math.nan

    def begin_step(self) -> None:
        """Must be called before a step's first batch, on all ranks."""
        place = self._num_steps % EVERY_STEPS
        self._num_steps += 1
        self.close()
        if place == 0:
            self._choose_bucket()
        for window in _WINDOWS:
            if place == window.stop:
                self._end_window(is_last=window is _WINDOWS[-1])
            elif place in window:
                self._handles = [
                    parameter.register_hook(partial(self._add, number)) for number, parameter in enumerate(self._bucket)
                ]

    def end_backward(self) -> None:
        """Must be called after every backward; looks at gradients if they were synchronized. All ranks must call it."""
        if not self._handles or not self._model().require_backward_grad_sync:
            return
        local = [self._local.get(number, self._pick(number, None)) for number in range(len(self._bucket))]
        self.close()
        picked = [self._pick(number, parameter.grad) for number, parameter in enumerate(self._bucket)]
        averaged = torch.cat(picked).cpu()
        exact = torch.cat(local).cpu()
        with issued_by("plan='auto'"):
            dist.all_reduce(exact, group=self._group)
        exact /= dist.get_world_size(self._group)
        squared_norm = float(exact.square().sum())
        if math.isfinite(squared_norm):
            self._squared_norm += squared_norm
            error = float((averaged - exact).square().sum())
            self._squared_error += error if math.isfinite(error) else math.inf

    def close(self) -> None:
        """Stops looking at the present step."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._local = [], {}

    def _choose_bucket(self) -> None:
        model = self._model()
        parameters = list(synced_parameters(model).values())
        refresh_bucket_parameters(model)
        buckets = bucket_parameters(model) or [list(range(len(parameters)))]
        self._bucket = [parameters[index] for index in buckets[_STRIDE * self._num_looks % len(buckets)]]
        self._num_looks += 1
        sizes = [as_real(parameter).numel() for parameter in self._bucket]
        stride = -(-sum(sizes) // _MAX_ELEMENTS)
        starts = itertools.accumulate(sizes[:-1], initial=0)
        self._places = [slice(-start % stride, None, stride) for start in starts]

    def _pick(self, number: int, gradient: Tensor | None) -> Tensor:
        """Returns a copy of some elements; zeros where there is no gradient, or a sparse one."""
        if gradient is None or gradient.is_sparse:
            gradient = torch.zeros_like(self._bucket[number])
        return as_real(gradient.detach()).reshape(-1)[self._places[number]].to(torch.float64, copy=True)

    def _add(self, number: int, gradient: Tensor) -> None:
        picked, before = self._pick(number, gradient), self._local.get(number)
        self._local[number] = picked if before is None else before + picked

    def _end_window(self, *, is_last: bool) -> None:
        if self._squared_norm > 0:
            self._shares.append(math.sqrt(self._squared_error / self._squared_norm))
        self._squared_error = self._squared_norm = 0.0
        if is_last and self._shares:
            self.error = min(self._shares)
            self._shares = []
