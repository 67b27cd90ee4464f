"""The common base of the classifiers."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F


class Classifier(LightningModule):
    """Learns classes by cross-entropy; a subclass has ``forward``, from a batch of inputs to ``(B, classes)`` logits.

    Logs ``train_loss``, and in validation ``val_loss`` and ``val_accuracy``, which are averaged over ranks.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss of ``(inputs, labels)``."""
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs), labels)
        self.log("train_loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy of ``(inputs, labels)``."""
        inputs, labels = batch
        logits = self(inputs)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        values = {"val_loss": F.cross_entropy(logits, labels), "val_accuracy": accuracy}
        self.log_dict(values, prog_bar=True, sync_dist=True, batch_size=len(labels))
