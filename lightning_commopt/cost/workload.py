"""Workload: what a step computes. Predictions are made from it and a `Link`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_commopt.text.validation import check_integer


class Shape(NamedTuple):
    """The shape of a parameter, and the bytes of an element of its gradient."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Gradient(NamedTuple):
    """The gradient of one parameter."""

    name: str  # name of the parameter
    shape: tuple[int, ...]  # shape of the gradient and its parameter
    itemsize: int  # bytes of an element
    ready_s: float  # time from the start of backward until it is computed, if nothing else used the processor

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one rank without communication. Times are medians over steps and ranks."""

    gradients: tuple[Gradient, ...]  # ordered by when they are ready, as DDP's buckets hold them
    forward_s: float  # forward of the model, in all accumulated batches
    backward_s: float  # computation of the backward that is synchronized
    rest_s: float  # everything else in a step: optimizer, hooks, backwards that are not synchronized
    data_s: float = 0.0  # waiting for all accumulated batches
    num_batches: int = 1  # batches that are accumulated for a step; gradients travel with the last one
    spread_s: float = 0.0  # standard deviation of a rank's computation from step to step
    num_ranks: int = 1  # ranks that the steps were measured on
    straggler_s: float = 0.0  # how long a step waits for whichever rank is last, with `num_ranks`
    shares_core: bool = False  # gradient sync has no processor of its own, so that its arithmetic slows backward down
    num_others: float = 0.0  # threads of other programs that want this rank's processor, on average
    device: str = "cpu"  # "cpu" or "cuda"
    is_per_gradient: bool = True  # whether each `Gradient.ready_s` was measured, and not interpolated between buckets

    @cached_property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    def accumulating(self, num_batches: int) -> Workload:
        """Returns the workload with another number of batches in a step; times that do not depend on it stay.

        Raises:
            ValueError: ``num_batches`` is below 1.
        """
        check_integer("num_batches", num_batches, at_least=1)
        factor, more = num_batches / self.num_batches, num_batches - self.num_batches
        return dataclasses.replace(
            self,
            forward_s=factor * self.forward_s,
            data_s=factor * self.data_s,
            rest_s=max(0.0, self.rest_s + more * self.backward_s),
            num_batches=num_batches,
        )
