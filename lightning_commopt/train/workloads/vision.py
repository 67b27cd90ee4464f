"""Models of torchvision on random images: the load of a real training without its data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_commopt.train.workloads.classifier import Classifier


class VisionModel(Classifier):
    """A classifier of torchvision by name, with random weights, trained with SGD.

    Maps ``(B, 3, height, width)`` images to ``(B, classes)`` logits.

    Logs ``train_loss``, and ``val_loss`` averaged over ranks. The accuracy of random labels would be meaningless.

    Args:
        name: name of the model for ``torchvision.models.get_model``, for example ``vit_l_32``.
        learning_rate: learning rate of SGD.
        options: further keywords for ``torchvision.models.get_model``.
    """

    def __init__(self, *, name: str, learning_rate: float = 1e-3, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        try:
            from torchvision.models import get_model
        except ImportError as error:
            raise ImportError(f"{name} needs torchvision: pip install 'lightning-commopt[vision]'") from error
        self.save_hyperparameters()
        self.net = get_model(name, weights=None, **(options or {}))


class _RandomImageDataset(Dataset[tuple[Tensor, int]]):
    def __init__(self, num_images: int, image_size: int, num_classes: int, seed: int) -> None:
        self._shape = (3, image_size, image_size)
        self._num_images, self._num_classes, self._seed = num_images, num_classes, seed

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self._seed + index)
        return torch.randn(self._shape, generator=generator), index % self._num_classes


class RandomImages(LightningDataModule):
    """Images of normal noise with labels; the same on every run.

    Args:
        num_images: images for training.
        num_validation_images: images for validation.
        image_size: height and width in pixels.
        num_classes: number of different labels.
        batch_size: images in a batch of one rank.
        num_workers: processes that make the images of one rank.
    """

    def __init__(
        self,
        *,
        num_images: int = 4096,
        num_validation_images: int = 64,
        image_size: int = 224,
        num_classes: int = 1000,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._training = _RandomImageDataset(num_images, image_size, num_classes, seed=0)
        self._validation = _RandomImageDataset(num_validation_images, image_size, num_classes, seed=num_images)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(self._training, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(self._validation, shuffle=False)

    def _loader(self, images: _RandomImageDataset, *, shuffle: bool) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
