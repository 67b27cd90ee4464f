"""Ranks that each run a Trainer in a process of its own, started one by one as between offices, of which some fail."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, RunRecorder
from lightning_commopt.sync.diloco import living
from support.lightnings import (
    Callback,
    CSVLogger,
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    Trainer,
)
from support.strategy_models import FEATURES, BatchNormed, Params, numbers

STEPS_PER_EPOCH = 12
KILLED, FROZEN, RAISES, TERMINATED = "killed", "frozen", "raises", "terminated"


@dataclass(frozen=True)
class Fit:
    """What each rank does.

    Attributes:
        folder: for checkpoints and logs.
        faults: for each rank that fails, how, and before which step.
        patience_s: see `CommOptDiLoCo`.
        options: further options of the strategy.
        pause_s: pause before each step.
        num_steps: steps in each of the three epochs.
        batch_size: samples of a step.
        noise: standard deviation of what is added to targets.
        seed: of the data.
        is_watched: whether our callbacks measure and watch.
    """

    folder: Path
    faults: dict[int, tuple[str, int]] = field(default_factory=dict)
    patience_s: float | None = 2.0
    options: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0
    num_steps: int = STEPS_PER_EPOCH
    batch_size: int = 4
    noise: float = 0.0
    seed: int = 0
    is_watched: bool = False


@dataclass(frozen=True)
class Ended:
    """What a rank returns when its fit has ended.

    Attributes:
        weights: parameters and buffers.
        metrics: ``callback_metrics``.
        val_losses: this rank's own loss in each validation.
        steps: optimizer steps.
        num_trained: batches that it has trained on.
        loss: of the weights, on samples that are the same on all ranks.
        best: name of the checkpoint that was best.
        log: what it has said.
        error: name of the exception that has ended the fit, or "".
    """

    weights: Params
    metrics: dict[str, float]
    val_losses: list[float]
    steps: int
    num_trained: int
    loss: float
    best: str
    log: list[str]
    error: str = ""


class Observed(BatchNormed):
    """Logs and validates in the ways for which Lightning needs all ranks."""

    lr = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.num_trained, self.val_losses = 0, list[float]()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_trained += 1
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_losses.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)
        self.metric.update(loss)
        self.log("val_metric", self.metric)


class Failing(Callback):
    """Fails as told, and tells of each step before."""

    def __init__(self, job: Fit, tell: Callable[[int, int], None]) -> None:
        self._job, self._tell = job, tell

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._tell(trainer.global_rank, trainer.global_step)
        time.sleep(self._job.pause_s)
        fault, step = self._job.faults.get(trainer.global_rank, ("", -1))
        if trainer.global_step != step:
            return
        if fault == RAISES:
            raise ArithmeticError("broken on purpose")
        os.kill(os.getpid(), {KILLED: signal.SIGKILL, FROZEN: signal.SIGSTOP, TERMINATED: signal.SIGTERM}[fault])


def fit(rank: int, world_size: int, store: dist.Store, port: int, job: Fit) -> Ended:
    """Fits on one rank of a site of its own; ``port`` is that of rank 0's store."""
    variables = {"NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    ended = train(job, lambda rank, step: store.set(f"step/{rank}/{step}", ""), num_nodes=world_size)
    living._close_open()  # ranks of a test end without what Python does at its end, where rank 0 waits for readers
    return ended


def train(job: Fit, tell: Callable[[int, int], None], *, devices: int = 1, num_nodes: int = 1) -> Ended:
    """Fits on this rank, and on those that Lightning starts for it."""
    mean = {"outer_lr": 1.0, "outer_momentum": 0.0}
    strategy = CommOptDiLoCo(sync_every=4, patience_s=job.patience_s, **{**mean, **job.options})
    log: list[str] = []
    strategy._log_text = log.append  # type: ignore[method-assign, assignment]
    best = ModelCheckpoint(job.folder / "best", monitor="val_loss", filename="{epoch}", save_top_k=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        max_epochs=3,
        num_sanity_val_steps=0,
        logger=CSVLogger(job.folder / "logs"),
        callbacks=[best, Failing(job, tell), *(_watching(job.folder) if job.is_watched else ())],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model, error = Observed(), ""
    try:
        trainer.fit(model, datamodule=_Data(job))
        trainer.save_checkpoint(job.folder / "after.ckpt")
    except BaseException as exception:
        if type(exception).__name__ != "SIGTERMException":
            raise
        error = type(exception).__name__
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    with torch.no_grad():
        loss = float(model.eval().loss(_samples(job, 2000, 4096)))
    return Ended(
        weights=numbers(model),
        metrics=metrics,
        val_losses=model.val_losses,
        steps=trainer.global_step,
        num_trained=model.num_trained,
        loss=loss,
        best=Path(best.best_model_path).name,
        log=log,
        error=error,
    )


def _watching(folder: Path) -> list[Callback]:
    monitor = CommTimeMonitor(dirpath=folder, every_n_steps=3, num_warmup_steps=1)
    return [monitor, HangMonitor(after_s=30.0, action="abort", dirpath=folder), RunRecorder(dirpath=folder)]


class _Data(LightningDataModule):
    """Other samples on each rank."""

    def __init__(self, job: Fit) -> None:
        super().__init__()
        self._job = job

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, self._job.num_steps)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1000, 2)

    def _loader(self, seed: int, num_batches: int) -> DataLoader[Any]:
        assert self.trainer is not None
        size = self._job.batch_size
        data = TensorDataset(*_samples(self._job, seed + self.trainer.global_rank, num_batches * size))
        return DataLoader(data, batch_size=size)


def _samples(job: Fit, seed: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * job.seed + seed)
    x = torch.randn(number, FEATURES, generator=generator)
    noise = job.noise * torch.randn(number, 1, generator=generator)
    return x, x.sum(1, keepdim=True).sin() + noise


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
