"""A multi-layer perceptron in four sizes, and blobs to train it on: linear layers take nearly all of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_commopt.text.validation import check_integer
from lightning_commopt.train.workloads.classifier import Classifier

_NUM_FEATURES, _NUM_CLASSES = 784, 10  # as MNIST: 28x28 pixels, ten digits
SIZES: dict[str, tuple[int, ...]] = {
    "small": (1024, 512, 256),
    "medium": (2048, 2048, 1024, 512),
    "large": (4096, 4096, 2048, 2048, 1024, 512),
    "xlarge": (4096, 4096, 4096, 2048, 2048, 1024, 512),
}
"""Widths of the hidden layers."""


class MLP(Classifier):
    """Linear layers with ReLU between them, ``(B, 784)`` features to ``(B, 10)`` logits, trained with SGD.

    The sizes have 1.5, 8.4, 35.2 and 52.0 million parameters. A write-up that compares ways of data parallelism gives
    the layers of the first three; of ``xlarge`` it gives only the count, which these widths match. Weights are
    initialized as by He et al. (2015), so that deep ones train as fast as shallow ones.

    Logs ``train_loss``, and over all ranks ``val_loss`` and ``val_accuracy``.

    Args:
        size: "small", "medium", "large" or "xlarge", or the widths of the hidden layers.
        learning_rate: learning rate of SGD.
    """

    def __init__(self, *, size: str | Sequence[int] = "small", learning_rate: float = 0.01) -> None:
        super().__init__(_NUM_CLASSES)
        hidden = _widths(size)
        self.save_hyperparameters(
            {"size": size if isinstance(size, str) else list(hidden), "learning_rate": learning_rate}
        )
        layers: list[nn.Module] = []
        for width, next_width in pairwise((_NUM_FEATURES, *hidden, _NUM_CLASSES)):
            linear = nn.Linear(width, next_width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])


class Blobs(LightningDataModule):
    """Normal noise around the centres of 10 classes in 784 dimensions; the same samples on every run.

    Args:
        num_samples: samples for training.
        num_validation_samples: samples for validation.
        separation: standard deviation of the centres' coordinates, where the noise has 1. With the default the loss of
            ``MLP`` falls over several epochs of some 30 steps; from 1 on nearly all of it in the first epoch.
        batch_size: samples in a batch of one rank.
    """

    def __init__(
        self,
        *,
        num_samples: int = 32768,
        num_validation_samples: int = 2048,
        separation: float = 0.2,
        batch_size: int = 512,
    ) -> None:
        super().__init__()
        check_integer("num_samples", num_samples, at_least=1)
        check_integer("num_validation_samples", num_validation_samples, at_least=1)
        if separation < 0:
            raise ValueError(f"separation must be at least 0, got {separation!r}")
        self.num_samples = num_samples
        self.num_validation_samples = num_validation_samples
        self.separation = separation
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Draws the samples: 3 kB each."""
        generator = torch.Generator().manual_seed(0)
        centres = self.separation * torch.randn(_NUM_CLASSES, _NUM_FEATURES, generator=generator)
        self._training = _Samples(centres, self.num_samples, generator)
        self._validation = _Samples(centres, self.num_validation_samples, generator)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self._training, self.batch_size, is_training=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self._validation, 4 * self.batch_size, is_training=False)

    def _loader(self, samples: _Samples, batch_size: int, *, is_training: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            samples,
            batch_size=batch_size,
            shuffle=is_training,
            drop_last=is_training,
            collate_fn=_identity,
            pin_memory=torch.cuda.is_available(),
        )


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are fetched a batch at a time: one by one would take longer than a step of a small network."""

    def __init__(self, centres: Tensor, num_samples: int, generator: torch.Generator) -> None:
        self._labels = torch.randint(len(centres), (num_samples,), generator=generator)
        self._features = torch.randn(num_samples, centres.shape[1], generator=generator).add_(centres[self._labels])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._features[index], self._labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._features[chosen], self._labels[chosen]


def _identity(batch: Any) -> Any:
    return batch


def _widths(size: Any) -> tuple[int, ...]:
    widths = SIZES.get(size) if isinstance(size, str) else size
    if isinstance(widths, Sequence) and widths and all(isinstance(width, int) and width > 0 for width in widths):
        return tuple(widths)
    raise ValueError(f"size must be one of {', '.join(SIZES)}, or a list of widths, got {size!r}")
