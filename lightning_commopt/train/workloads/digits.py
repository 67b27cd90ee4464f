"""scikit-learn's handwritten digits and a small convolutional network."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_commopt.train.workloads.classifier import Classifier

_NUM_CLASSES = 10  # the digits 0 to 9
_VALIDATION_SHARE = 0.2  # 359 images, so that accuracy has steps of 0.3 %


class DigitsCNN(Classifier):
    """Two convolutions and two linear layers, ``(B, 1, 8, 8)`` images to ``(B, 10)`` logits, trained with Adam.

    Logs ``train_loss``, and over all ranks ``val_loss`` and ``val_accuracy``.

    Args:
        num_channels: channels of the first convolution; the second has twice as many.
        hidden: width of the hidden linear layer.
        learning_rate: Adam's learning rate.
    """

    def __init__(self, *, num_channels: int = 32, hidden: int = 256, learning_rate: float = 1e-3) -> None:
        super().__init__(_NUM_CLASSES)
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, num_channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_channels, 2 * num_channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * num_channels * 16, hidden),
            nn.ReLU(),
            nn.Linear(hidden, _NUM_CLASSES),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


class Digits(LightningDataModule):
    """1,797 images of 8x8 pixels in [0, 1] with labels 0 to 9; a fixed fifth of them is for validation."""

    def __init__(self, *, batch_size: int = 32) -> None:
        super().__init__()
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError("the digits need scikit-learn: pip install 'lightning-commopt[digits]'") from error
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
        self._all = TensorDataset(images, torch.from_numpy(labels).long())
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        count = int(len(images) * _VALIDATION_SHARE)
        self._validation, self._training = order[:count], order[count:]
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(Subset(self._all, self._training), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(Subset(self._all, self._validation), batch_size=4 * self.batch_size)
