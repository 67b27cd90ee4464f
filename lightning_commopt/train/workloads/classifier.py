"""The base class of the classifiers."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_commopt.strategy.sharding import shard

_MIN_UNIT_NUMEL = 10_000_000  # 40 MB in float32: smaller units send more and smaller messages, larger ones take memory


class Classifier(LightningModule):
    """Learns classes by cross-entropy, with SGD; subclasses make ``net``, from inputs to ``(B, classes)`` logits.

    Logs ``train_loss``, and in validation ``val_loss`` and ``val_accuracy``, over all ranks.

    Args:
        num_classes: number of classes; None if labels are random, so that accuracy is meaningless.
    """

    net: nn.Module

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        self.val_accuracy = None
        if num_classes is not None:
            # Validating arguments would make every step of a validation wait for the device.
            self.val_accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)

    def configure_model(self) -> None:
        """Shards the model, for strategies that need it (FSDP2): large modules are units."""
        if self.device_mesh is not None:
            shard(self, self.device_mesh, blocks=_MIN_UNIT_NUMEL)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self(inputs)
        loss = F.cross_entropy(logits, labels)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(labels))
        if self.val_accuracy is not None:
            self.val_accuracy.update(logits, labels)
            self.log("val_accuracy", self.val_accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"])
