"""Workload: what a model asks of gradient sync: when each gradient is ready, and the rest of a step."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_commopt.text.validation import check_integer


class Gradient(NamedTuple):
    """The gradient of one parameter."""

    name: str  # of the parameter
    shape: tuple[int, ...]  # of it
    itemsize: int  # bytes of an element
    ready_s: float  # from the start of backward until it is computed, if nothing else used the processor

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one rank without communication. All times are medians over steps and ranks."""

    gradients: tuple[Gradient, ...]  # in the order in which they become ready, which is that of DDP's buckets
    forward_s: float  # of the model, in all accumulated batches
    backward_s: float  # that the synchronized backward computes
    rest_s: float  # everything else in a step: data, optimizer, hooks, backwards that are not synchronized
    num_batches: int = 1  # that are accumulated for a step; gradients travel with the last one
    spread_s: float = 0.0  # standard deviation of a rank's computation from step to step
    num_ranks: int = 1  # that the steps were measured on
    straggler_s: float = 0.0  # that a step waits for whichever rank is last, with `num_ranks`
    shares_core: bool = False  # gradient sync has no processor of its own, so that its arithmetic slows backward down
    num_others: float = 0.0  # of other programs that want this rank's processor, in the mean
    device: str = "cpu"  # "cpu" or "cuda"
    is_per_gradient: bool = True  # `Gradient.ready_s` was measured for each; else interpolated between buckets

    @cached_property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    def accumulating(self, num_batches: int) -> Workload:
        """Returns the same with another number of batches to a step; what is not forward or backward stays.

        Raises:
            ValueError: ``num_batches`` is below 1.
        """
        check_integer("num_batches", num_batches, at_least=1)
        forward_s, more = self.forward_s / self.num_batches, num_batches - self.num_batches
        return dataclasses.replace(
            self,
            forward_s=num_batches * forward_s,
            rest_s=max(0.0, self.rest_s + more * self.backward_s),
            num_batches=num_batches,
        )

    def slower(self, factor: float) -> Workload:
        """Returns the same on a processor that takes ``factor`` times as long, or shared by as many ranks."""
        return dataclasses.replace(
            self,
            gradients=tuple(one._replace(ready_s=factor * one.ready_s) for one in self.gradients),
            **{name: factor * getattr(self, name) for name in ("forward_s", "backward_s", "rest_s", "straggler_s")},
        )
