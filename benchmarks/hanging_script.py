"""Trains as one rank of a job in which something goes wrong; `hangs.py` starts it, and says what by the environment.

``FAULT`` names what goes wrong on rank ``FAULT_RANK`` in step ``FAULT_STEP``, ``STRATEGY`` is "ddp" or "commopt",
``MONITOR`` is "1" for a `HangMonitor`, ``FOLDER`` is where the time of the fault is left. The rank finds its number and
its peers in Lightning's variables.
"""

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hang_judge import FIRST_STEP
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_commopt import CommOptDDP

FAULT, FAULT_RANK = os.environ["FAULT"], int(os.environ["FAULT_RANK"])
FAULT_STEP = int(os.environ["FAULT_STEP"])
FOLDER = Path(os.environ["FOLDER"])
NUM_BATCHES, FEWER_BATCHES = 12, 5
FOREVER_S = 3600.0
AT_START = ("interface", "port", "absent")


class Rows(Dataset[Tensor]):
    """Rows of noise; where the dataloader's worker is to sleep, reading one never ends."""

    def __init__(self, num_rows: int, sleeps_at: int | None) -> None:
        self.num_rows = num_rows
        self.sleeps_at = sleeps_at

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Tensor:
        if index == self.sleeps_at:
            mark_fault()
            time.sleep(FOREVER_S)
        return torch.full((8,), float(index))


class Model(LightningModule):
    """Two layers; what goes wrong does so in the training step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.extra = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(8, 1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Returns batches of two rows, one a second step on a fault of the data."""
        is_faulty = self.global_rank == FAULT_RANK
        num_batches = FEWER_BATCHES if FAULT == "uneven" and is_faulty else NUM_BATCHES
        if FAULT == "uneven" and is_faulty:
            mark_fault()
        sleeps = FAULT == "worker" and is_faulty
        rows = Rows(2 * num_batches, 2 * FAULT_STEP if sleeps else None)
        return DataLoader(rows, batch_size=2, num_workers=int(FAULT == "worker"))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss, if nothing goes wrong."""
        if batch_idx == 0:
            print(FIRST_STEP, flush=True)
        is_faulty = batch_idx == FAULT_STEP and self.global_rank == FAULT_RANK
        if batch_idx == FAULT_STEP:
            inject(self, is_faulty)
        out = self.second(torch.relu(self.first(batch)))
        if not (FAULT == "unused" and is_faulty):
            out = out + self.extra(batch)
        return out.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD, slow enough for finite losses."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def inject(module: LightningModule, is_faulty: bool) -> None:
    """Does what goes wrong in a step, and on the other ranks what should have gone right."""
    if is_faulty and FAULT not in ("uneven", "worker", *AT_START):
        mark_fault()
    if FAULT == "stopped" and is_faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "killed" and is_faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "exception" and is_faulty:
        raise ArithmeticError("broken on purpose")
    elif FAULT == "skipped" and not is_faulty:
        dist.all_reduce(torch.ones(3))
    elif FAULT == "sizes":
        dist.all_reduce(torch.ones(4 if is_faulty else 3))
    elif FAULT == "order":
        first, second = (reduce, broadcast) if is_faulty else (broadcast, reduce)
        first()
        second()
    elif FAULT == "logging" and is_faulty:
        module.log("only_here", 1.0, on_step=True, on_epoch=False, sync_dist=True)
    elif FAULT == "network" and is_faulty:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def reduce() -> None:
    """Adds a vector up over all ranks."""
    dist.all_reduce(torch.ones(3))


def broadcast() -> None:
    """Gets a vector from rank 0."""
    dist.broadcast(torch.ones(3), src=0)


def mark_fault() -> None:
    """Leaves the time at which the fault begins."""
    (FOLDER / "fault").write_text(str(time.time()))


def callbacks() -> Iterator[Any]:
    """Yields the monitor, if it is asked for."""
    if os.environ["MONITOR"] == "1":
        from lightning_commopt.callbacks import HangMonitor

        # A host keeps its own report: one that is cut off cannot write to the disk of another.
        yield HangMonitor(after_s=5.0, action="abort", dirpath=FOLDER / f"host{os.environ['NODE_RANK']}")


def main() -> None:
    """Trains; ranks of a fault at the start come in at the same time."""
    warnings.filterwarnings("ignore")
    timeout = timedelta(seconds=float(os.environ["GROUP_TIMEOUT_S"]))
    strategy = (CommOptDDP if os.environ["STRATEGY"] == "commopt" else DDPStrategy)(timeout=timeout)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks()),
    )
    if FAULT in AT_START and os.environ["NODE_RANK"] == "0":
        mark_fault()
    trainer.fit(Model())
    print("TRAINED", trainer.global_step, flush=True)


if __name__ == "__main__":
    main()
