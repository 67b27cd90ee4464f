"""A small model, and any gradients one likes sent through DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Matrices, vectors, convolutions and a scalar, mixed; some are not contiguous, as DDP then lays them out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.conv = nn.Conv1d(4, 16, 3)
        self.first = nn.Linear(32, 24)
        self.second = nn.Linear(24, 40)
        self.scalar = nn.Parameter(torch.ones(()))
        self.image = nn.Conv2d(4, 16, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.empty(24, 32).t())
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


class LargeNet(nn.Module):
    """Odd sizes: more than one tile of every kernel, and more partial sums than are added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(257, 513)
        self.second = nn.Linear(513, 131)
        self.image = nn.Conv2d(33, 17, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.empty(12, 2101))
        self.tall = nn.Parameter(torch.empty(4101, 6))
        self.vocabulary = nn.Parameter(torch.empty(33_001, 5))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


class Vectors(nn.Module):
    """Nothing that is worth compressing, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(7.0))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5, 300))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a loss, whose gradients are ``x`` and its sum."""
        return (self.bias * x).sum() + self.one.sum() * x.sum()


def random_gradients(step: int, rank: int, scale: float = 1.0, net: Callable[[], nn.Module] = Net) -> dict[str, Tensor]:
    """Returns normally distributed gradients of a network on the CPU, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in _shapes(net).items()}


@cache
def _shapes(net: Callable[[], nn.Module]) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in net().named_parameters()}


def send(model: DistributedDataParallel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sends gradients through DDP: those of the loss ``sum(parameter * gradient)``.

    Returns:
        The average, as the optimizer would see it.
    """
    module = model.module
    original, module.forward = (
        module.forward,
        lambda: sum((parameter * gradients[name]).sum() for name, parameter in module.named_parameters()),
    )
    model.zero_grad()
    model().backward()
    module.forward = original
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def flatten(tensors: dict[str, Tensor]) -> Tensor:
    """Returns all tensors in one, ``(n,)`` float64 on the CPU."""
    return torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in tensors.values()])
