"""When a backward through a DDP wrapper begins and ends, where no strategy runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.torch import call_after_backward
from lightning_commopt.sync.hook import GradientSyncError


class Backwards:
    """Follows the synchronized backwards of a DDP wrapper, by hooks on the outputs of its forward.

    Args:
        begin: called when a backward reaches an output of the wrapper, before any gradient of its parameters.
        end: called when that backward is over, unless it raised.

    Attributes:
        is_running: whether a backward has begun, and neither ended nor been followed by another forward.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._wrapping = 0
        self.is_running = False

    def follow(self, model: DistributedDataParallel) -> None:
        """Follows a wrapper that was just made, instead of the one before."""
        self._wrapping += 1
        self.is_running = False
        model.register_forward_hook(torch.compiler.disable(self._after_forward))

    def _after_forward(self, model: DistributedDataParallel, inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or not model.require_backward_grad_sync:
            return
        self.is_running = False
        wrapping = self._wrapping

        def reach(gradient: Tensor) -> None:
            if wrapping != self._wrapping:
                raise GradientSyncError(
                    "a plan was applied between forward and backward, so this backward's gradients would not be"
                    " averaged: call apply_plan before forward or after backward"
                )
            if not self.is_running:
                self.is_running = True
                self._begin()
                call_after_backward(self._finish)

        def register(output: Tensor) -> Tensor:
            if output.requires_grad:
                output.register_hook(reach)
            return output

        apply_to_collection(outputs, Tensor, register)

    def _finish(self) -> None:
        self.is_running = False
        self._end()
