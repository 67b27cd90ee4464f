"""A small module to train in a loop on Fabric, with the loss of each rank's batches."""

import torch
from torch import Tensor, nn

from support.strategy_models import Params


class Net(nn.Module):
    """Has a buffer that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Returns the loss of a batch that depends on the rank and the step only."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))


def numbers(module: nn.Module) -> Params:
    return {name: x.double().numpy().copy() for name, x in module.state_dict().items()}
