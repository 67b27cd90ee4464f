"""Trains as one rank of a job in which something goes wrong; `hangs.py` starts it, and says what by the environment.

``FAULT`` names what goes wrong on rank ``FAULT_RANK`` in step ``FAULT_STEP``, ``STRATEGY`` is "ddp" or "commopt",
``DEVICE`` is "cpu" or "cuda", ``MONITOR`` is "1" for a `HangMonitor`, ``FOLDER`` is where the time of the fault is
left. The rank finds its number and its peers in Lightning's variables.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hang_judge import FIRST_STEP
from hanging_callbacks import FAULT, FAULT_RANK, FAULT_STEP, FOLDER, FOREVER_S, Tracker, mark_fault, others
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_commopt import CommOptDDP

NUM_BATCHES, FEWER_BATCHES = 12, 5
AT_START = ("interface", "port", "absent")
IN_CALLBACKS = ("batch_end", "optimizer_hook", "validation_end", "checkpoint", "logger")


SIGNALS = {
    "killed": signal.SIGKILL,
    "signal": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


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
        if FAULT == "logger":
            self.log("loss", out.mean())
        if not (FAULT == "unused" and is_faulty):
            out = out + self.extra(batch)
        return out.pow(2).mean()

    def val_dataloader(self) -> DataLoader[Tensor] | list[Any]:
        """Returns batches where the validation is at fault."""
        return DataLoader(Rows(4, None), batch_size=2) if FAULT == "validation_end" else []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Computes the same."""
        self.second(torch.relu(self.first(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD, slow enough for finite losses."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def inject(module: LightningModule, is_faulty: bool) -> None:
    """Does what goes wrong in a step, and on the other ranks what should have gone right."""
    if is_faulty and FAULT not in ("uneven", "worker", *AT_START, *IN_CALLBACKS):
        mark_fault()
    if FAULT == "stopped" and is_faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT in SIGNALS and is_faulty:
        os.kill(os.getpid(), SIGNALS[FAULT])
    elif FAULT == "sys_exit" and is_faulty:
        sys.exit(3)
    elif FAULT == "should_stop" and is_faulty:
        module.trainer.should_stop = True
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
        accelerator=os.environ["DEVICE"],
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=Tracker() if FAULT == "logger" else False,
        log_every_n_steps=1,
        val_check_interval=FAULT_STEP + 1 if FAULT == "validation_end" else None,
        num_sanity_val_steps=0,
        enable_checkpointing=FAULT == "checkpoint",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks(), *others()],
    )
    if FAULT in AT_START and os.environ["NODE_RANK"] == "0":
        mark_fault()
    trainer.fit(Model())
    print("TRAINED", trainer.global_step, flush=True)


if __name__ == "__main__":
    main()
