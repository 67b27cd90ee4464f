"""What ranks of a Trainer with `CommTimeMonitor` do on the fake device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_commopt import CommOptDDP, CommOptModelParallel
from lightning_commopt.callbacks import CommTimeMonitor

NUM_LAYERS, NUM_STEPS = 3, 8
_WIDTH = 48


class _Layers(LightningModule):
    """A few layers, each a unit of FSDP2 where a strategy has a mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(NUM_LAYERS)])

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, CommOptModelParallel):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for module in (*self.layers, self):
                fully_shard(module, mesh=mesh)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_monitored(folder: Path, strategy: str, comm_hook: str | None) -> None:
    """Fits with "ddp" or "fsdp2", and leaves the records of all ranks in a folder."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    made: Any = (
        CommOptModelParallel(2, 1, comm_hook=comm_hook) if strategy == "fsdp2" else CommOptDDP(comm_hook=comm_hook)
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    monitor = CommTimeMonitor(every_n_steps=2, num_warmup_steps=1, dirpath=folder, print_summary=dist.get_rank() == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Trainer(accelerator="gpu", devices=2, strategy=made, max_steps=NUM_STEPS, callbacks=[monitor], **quiet)  # type: ignore[arg-type]
        run.fit(_Layers(), DataLoader(torch.randn(64, _WIDTH), batch_size=2))  # type: ignore[arg-type]
