"""Self-supervised training as solo-learn and lightning-bolts write it: a teacher, and an evaluator in a callback."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lossless_fits import assert_trains_as_lightnings_ddp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.exhaustive


class _Distilled(LightningModule):
    """Compares its outputs with those of its moving average on all ranks; the last layer trains from epoch 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
        self.last = nn.Linear(8, 8, bias=False)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        student = F.normalize(self.last(self.encoder(batch[0])), dim=1)
        with torch.no_grad():
            teacher = F.normalize(self.teacher(batch[0]), dim=1)
        students: Any = self.all_gather(student, sync_grads=True)
        teachers: Any = self.all_gather(teacher)
        logits = students.flatten(0, 1) @ teachers.flatten(0, 1).T
        return F.cross_entropy(logits / 0.2, torch.arange(len(logits)))

    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            self.last.weight.grad = None

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        progress = self.global_step / self.trainer.estimated_stepping_batches
        for own, moving in zip(self.encoder.parameters(), self.teacher.parameters(), strict=True):
            moving.lerp_(own, 0.1 * (1 - progress))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([x for x in self.parameters() if x.requires_grad], lr=0.01)


class _Evaluator(Callback):
    """Trains a classifier on the features, in a wrapper of its own, beside the strategy's."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.classifier = DistributedDataParallel(nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.classifier.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            features = pl_module.encoder(batch[0])
        F.cross_entropy(self.classifier(features), batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _distilled() -> tuple[LightningModule, Any]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return _Distilled(), DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=4)


def _evaluator() -> list[Callback]:
    return [_Evaluator()]


@pytest.mark.parametrize("callbacks", [list, _evaluator])
def test_trains_as_with_lightnings_ddp(callbacks: Callable[[], list[Callback]]) -> None:
    """If it fails, gathers with gradients, dropped gradients or a callback's collectives meet a plan's."""
    assert_trains_as_lightnings_ddp(_distilled, callbacks=callbacks)
