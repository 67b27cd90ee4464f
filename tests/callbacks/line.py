"""A model of one layer, for tests that train it on CPU."""

from typing import Any

import torch
from torch import Tensor

from support.lightnings import LightningModule, ModelCheckpoint
from support.strategy_models import trainer


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: Any = torch.nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_for(callbacks: list[Any], **settings: Any) -> Any:
    """Returns a Trainer of one epoch in this process, which saves if a callback does."""
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"strategy": "auto", "callbacks": callbacks, "enable_checkpointing": saves, "max_epochs": 1}
    return trainer(**{**options, **settings})
