"""Unwraps a model from DDP in the middle of training, and keeps what the next wrapper needs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.torch import stop_reducing
from lightning_commopt.compressors.base import as_real


class Trainable:
    """Which parameters of a model required a gradient when it was wrapped: those that DDP synchronizes."""

    def __init__(self, model: Module) -> None:
        parameters = list(model.parameters())
        self._trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def some_unfrozen(self) -> bool:
        """Returns whether a parameter that DDP does not synchronize was unfrozen."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def some_frozen(self) -> bool:
        """Returns whether a parameter that DDP waits for was frozen."""
        return not all(parameter.requires_grad for parameter in self._trainable)


@contextmanager
def kept_buffers(module: Module) -> Generator[None, None, None]:
    """Restores the values of the buffers of ``module`` at the end."""
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def unwrap(model: DistributedDataParallel) -> Module:
    """Returns the module of a wrapper, which must not be used afterwards; gradients are kept."""
    stop_reducing(model)
    for parameter in model.module.parameters():
        if parameter.grad is not None and model.gradient_as_bucket_view:
            parameter.grad = parameter.grad.clone()  # was a view of a bucket that is freed
    return model.module


class ResidualAdder:
    """Adds residuals to the next gradients of their parameters, once.

    Args:
        module: whose parameters; frozen ones are left out.
        residuals: by parameter name; of its shape, or for a complex one as pairs of real numbers.

    Attributes:
        residuals: those that have not been added yet.
    """

    def __init__(self, module: Module, residuals: dict[str, Tensor]) -> None:
        parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.residuals = {name: value for name, value in residuals.items() if name in parameters}
        self._handles = {name: self._add_once(name, parameters[name]) for name in self.residuals}

    def _add_once(self, name: str, parameter: Parameter) -> RemovableHandle:
        def add(gradient: Tensor) -> Tensor:
            self._handles.pop(name).remove()
            total = as_real(gradient) + self.residuals.pop(name).to(as_real(gradient))
            return torch.view_as_complex(total) if gradient.is_complex() else total

        return parameter.register_hook(add)

    def cancel(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.residuals.clear()
