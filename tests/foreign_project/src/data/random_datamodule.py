"""The project's data."""

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class RandomDataModule(LightningDataModule):
    """Random vectors of eight numbers."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns 64 of them."""
        vectors = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(vectors), batch_size=self.batch_size, shuffle=True)
