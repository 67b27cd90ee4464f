"""Trains as a rank of torchrun that goes on from the last checkpoint; one rank fails once. Run by ``test_restarts``.

Usage: restarting_script.py FOLDER KIND MONITOR FAULT RANK

KIND is "ddp", "fsdp2" or "fabric"; MONITOR is 1 for a HangMonitor; FAULT is what RANK does in epoch 1: ``raise`` or
``kill``.
"""

from __future__ import annotations

import os
import signal
import sys
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

_NUM_EPOCHS = 3


class Sharded(Steady):
    """Is sharded over all ranks, for FSDP2."""

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=torch.nn.Linear)


def train(kind: str, folder: Path, *begins: Any, has_monitor: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Trains from the last checkpoint of a folder, if it has one; returns the whole model's state."""
    model = (Sharded if kind == "fsdp2" else Steady)(*begins)
    if kind == "fabric":
        train_with_fabric(model, folder, **options)
    else:
        strategy: Any = CommOptDDP(comm_hook="int8")  # its residuals are in the checkpoint
        if kind == "fsdp2":
            strategy = CommOptModelParallel(data_parallel_size=2, tensor_parallel_size=1)
        saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_top_k=0)
        monitors = [HangMonitor(after_s=30, action="abort", dirpath=folder)] if has_monitor else []
        callbacks = [saver, *monitors]
        run = trainer(strategy, callbacks=callbacks, enable_checkpointing=True, max_epochs=_NUM_EPOCHS, **options)
        last = folder / "last.ckpt"
        run.fit(model, ckpt_path=last if last.exists() else None)
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def train_with_fabric(model: Steady, folder: Path, **options: Any) -> None:
    """Trains with Fabric, and with a ``bf16`` hook, which keeps nothing from step to step."""
    fabric = Fabric(accelerator="cpu", strategy=FabricCommOptDDP(comm_hook="bf16"), **options)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "epoch": 0}
    last = folder / "last.ckpt"
    if last.exists():
        fabric.load(last, state)
    batches = loader(24)
    while state["epoch"] < _NUM_EPOCHS:
        for index, batch in enumerate(batches):
            model.begin_batch(fabric.global_rank, state["epoch"], index)
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(wrapped(batch[0]), batch[1]))
            optimizer.step()
        state["epoch"] += 1
        fabric.save(last, state)


def main() -> None:
    folder, kind, has_monitor, fault, failing_rank = Path(sys.argv[1]), *sys.argv[2:]

    def fail_once(rank: int, epoch: int, index: int) -> None:
        if (rank, epoch, index) != (int(failing_rank), 1, 1) or (folder / "failed").exists():
            return
        (folder / "failed").touch()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("broken on purpose")

    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        with (folder / "attempts").open("a") as attempts:
            attempts.write("x")
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ["WORLD_SIZE"]) // num_local
    has_one = has_monitor == "1"
    state = train(kind, folder, fail_once, has_monitor=has_one, devices=num_local, num_nodes=num_nodes)
    if os.environ["RANK"] == "0":
        torch.save(state, folder / "weights.pt")


if __name__ == "__main__":
    main()
