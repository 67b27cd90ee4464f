"""The project that all examples share: a classifier and its data, ordinary Lightning code."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(LightningModule):
    """A small network that learns which of ten random directions a point lies closest to."""

    def __init__(self, width: int = 256, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs the share of right answers."""
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", hits, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"], momentum=0.9)


class Points(LightningDataModule):
    """Random points, and the direction that each of them lies closest to."""

    def __init__(self, num_points: int = 4096, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(num_points, 32, generator=generator)
        directions = torch.randn(10, 32, generator=generator)
        dataset = TensorDataset(points, (points @ directions.T).argmax(1))
        self.train, self.val = random_split(dataset, [0.9, 0.1], generator)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns nine tenths of the points."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns the other tenth."""
        return DataLoader(self.val, self.batch_size)
