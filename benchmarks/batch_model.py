"""A Lightning module of the benchmarks whose batches are all the same random samples."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class BatchModel(LightningModule):
    """Trains a classifier with SGD on samples of one batch; see `loader`."""

    def __init__(self, model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.model, self.inputs, self.labels = model, inputs, labels

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def loader(self, num_steps: int) -> DataLoader[Any]:
        """Returns batches of ``num_steps`` steps, each with as many samples as the one batch, drawn from it."""
        samples = TensorDataset(self.inputs, self.labels)
        sampler = RandomSampler(samples, replacement=True, num_samples=len(samples) * num_steps)
        return DataLoader(samples, len(samples), sampler=sampler)
