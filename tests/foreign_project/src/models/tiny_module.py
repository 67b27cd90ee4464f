"""The project's model."""

import torch
from lightning import LightningModule
from torch import Tensor, nn


class TinyModule(LightningModule):
    """Two layers that learn to add up their inputs."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the squared error."""
        (inputs,) = batch
        return nn.functional.mse_loss(self.net(inputs), inputs.sum(dim=1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
