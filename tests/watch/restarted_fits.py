"""Fits that go on from the last checkpoint of a folder, if it has one; for ``test_restarts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.callbacks import HangMonitor
from lightning_commopt.fabric import CommOptDDP as FabricCommOptDDP
from support.lightnings import ModelCheckpoint
from support.strategy_models import Steady, loader, trainer

NUM_EPOCHS = 3


class Sharded(Steady):
    """Is sharded over all ranks, for FSDP2."""

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=torch.nn.Linear)


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state of a module, shards of which may be on other ranks; all ranks must call it."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def fit(model: Steady, folder: Path, *, has_monitor: bool = False, **options: Any) -> None:
    """Trains with a Trainer; with DDP and an ``int8`` hook, whose residuals are in the checkpoint, or with FSDP2."""
    strategy: Any = CommOptDDP(comm_hook="int8")
    if isinstance(model, Sharded):
        strategy = CommOptModelParallel(data_parallel_size=2, tensor_parallel_size=1)
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_top_k=0)
    monitors = [HangMonitor(after_s=30, action="abort", dirpath=folder)] if has_monitor else []
    run = trainer(
        strategy,
        callbacks=[saver, *monitors],
        enable_checkpointing=True,
        max_epochs=NUM_EPOCHS,
        **options,
    )
    last = folder / "last.ckpt"
    run.fit(model, ckpt_path=last if last.exists() else None)


def train_with_fabric(model: Steady, folder: Path, **options: Any) -> None:
    """Trains with Fabric; with a ``bf16`` hook, which keeps nothing from step to step."""
    fabric = Fabric(accelerator="cpu", strategy=FabricCommOptDDP(comm_hook="bf16"), **options)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "epoch": 0}
    last = folder / "last.ckpt"
    if last.exists():
        fabric.load(last, state)
    batches = loader(24)
    while state["epoch"] < NUM_EPOCHS:
        for index, batch in enumerate(batches):
            model.begin_batch(fabric.global_rank, state["epoch"], index)
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(wrapped(batch[0]), batch[1]))
            optimizer.step()
        state["epoch"] += 1
        fabric.save(last, state)
