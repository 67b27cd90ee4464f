"""A small model that FSDP2 shards."""

from typing import Any

from torch import Tensor

from lightning_commopt import shard
from support.strategy_models import Tiny


class Sharded(Tiny):
    """A model of a few units that compute a loss."""

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=150)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)
