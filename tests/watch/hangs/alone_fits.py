"""Fits in which rank 0 calls what needs all ranks; for ``test_alone``."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_commopt.callbacks import HangMonitor
from support.lightnings import Callback, DDPStrategy
from support.strategy_models import Tiny, loader, trainer

_AFTER_S = 1.0
_REPORT_S = 200.0
_STEP = 4


class Alone(Callback):
    """Calls on rank 0, in the hook that a fault is named after."""

    def __init__(self, fault: str, folder: Path) -> None:
        self.hook, self.operation = fault.split(": ")
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "batch" and trainer.global_step == _STEP:
            self.call(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.hook == "epoch" and trainer.current_epoch == 0 and trainer.global_rank == 0:
            self.call(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.hook == "validation" and trainer.current_epoch == 0 and trainer.global_rank == 0:
            self.call(trainer, pl_module)

    @rank_zero_only
    def call(self, trainer: Any, pl_module: Any) -> None:
        if self.operation == "save":
            trainer.save_checkpoint(self.folder / "alone.ckpt")
        elif self.operation == "metric":
            pl_module.metric.compute()
        elif self.operation == "barrier":
            trainer.strategy.barrier()
        elif self.operation == "objects":
            dist.broadcast_object_list([{"a": 1}], src=0)
        elif self.operation == "log_dir":
            print(trainer.log_dir)


class Logged(Tiny):
    """Logs, or has uneven batches, on rank 0 alone."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.metric = fault, MeanMetric()

    def train_dataloader(self) -> Any:
        return loader(32 if self.fault == "rank: uneven" and self.global_rank == 0 else 48)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        if batch_idx == _STEP and self.global_rank == 0:
            if self.fault == "step: log":
                self.log("loss", loss, sync_dist=True)
            elif self.fault == "step: own":
                dist.barrier()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def fit_alone(folder: Path, fault: str) -> None:
    """Ends this process as soon as a hang is reported, which keeps the others waiting for ever."""
    report = folder / "hangs" / "report.json"
    threading.Thread(target=_end_after, args=(report,), daemon=True).start()
    callbacks: list[Any] = [HangMonitor(after_s=_AFTER_S, dirpath=folder)]
    callbacks += [Alone(fault, folder)] if fault.startswith(("batch", "epoch", "validation")) else []
    run = trainer(DDPStrategy(), callbacks=callbacks, max_epochs=1 if fault == "rank: uneven" else 2)
    run.fit(Logged(fault), val_dataloaders=loader(8) if fault.startswith("validation") else None)
    time.sleep(_REPORT_S)  # a rank that has no more batches


def _end_after(report: Path) -> None:
    deadline = time.monotonic() + _REPORT_S
    while time.monotonic() < deadline:
        try:
            json.loads(report.read_text())
            break
        except (OSError, ValueError):
            time.sleep(0.05)
    time.sleep(0.2)
    os._exit(0)
