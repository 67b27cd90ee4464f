"""Ends fits of two ranks in several ways, each rank as a process that ends as a user's program does.

Usage: ending_fits.py FOLDER CASE ...

A case is STRATEGY,WAY,WATCHED: WAY is where the fit ends, see `Ending`, and WATCHED whether our callbacks are in it.
Every rank's output is in FOLDER/CASE/RANK; for each case a line with the ranks' statuses is printed. The ranks are
forked from one process that has imported everything, and do not end by ``os._exit`` as those of multiprocessing do.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_commopt import CommOptDDP, CommOptModelParallel
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges, RunRecorder, SpeedMonitor
from support.lightnings import Callback, DDPStrategy
from support.strategy_models import Tiny, loader, trainer

_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.001}  # several buckets, so that some are under way when backward raises
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(**_SMALL),
    "bf16": lambda: CommOptDDP(comm_hook="bf16", **_SMALL),
    "fsdp2_bf16": lambda: CommOptModelParallel(comm_hook="bf16"),
}


class Ending(Tiny):
    """Ends a fit in its second step, in validation, in ``on_train_end`` or in a callback's ``on_exception``."""

    def __init__(self, way: str, is_sharded: bool) -> None:
        super().__init__()
        self.way, self.is_sharded = way, is_sharded

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self, FSDPModule):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.end()
        inner = self.layers[1](self.layers[0](batch[0])) if self.way == "backward" and batch_idx == 1 else None
        loss = self.loss(batch)
        if inner is not None:
            inner.register_hook(_raise)
            loss = loss + self.layers[2:](inner).mean()
        return loss

    def end(self) -> None:
        if self.way in ("step", "on_exception"):
            raise ValueError("mine")
        if self.way == "exit":
            sys.exit(3)
        if self.way in ("SIGTERM", "SIGINT"):
            os.kill(os.getpid(), getattr(signal, self.way))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.way == "validation":
            raise ValueError("mine")

    def on_train_end(self) -> None:
        if self.way == "train_end":
            raise ValueError("mine")


class Failing(Callback):
    """Comes before ours, which are therefore not notified of the exception."""

    def on_exception(self, *_: Any) -> None:
        raise ValueError("mine")


def _raise(_: Tensor) -> None:
    raise ValueError("mine")


def fit(strategy: str, way: str, watched: bool, folder: Path) -> None:
    """Trains on this rank, and ends in that way."""
    callbacks: list[Callback] = [Failing()] if way == "on_exception" else []
    if watched:
        comm_time = CommTimeMonitor(num_warmup_steps=1, every_n_steps=2)
        callbacks += [comm_time, HangMonitor(), SpeedMonitor(), NVTXRanges(), RunRecorder()]
    model = Ending("none" if way == "second" else way, is_sharded="fsdp2" in strategy)

    def run() -> None:
        options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "default_root_dir": folder, "callbacks": callbacks}
        trainer(STRATEGIES[strategy](), **options).fit(model, loader(), loader())

    run()
    if way == "second":
        model.way = "step"
        run()
    elif way == "after":
        raise ValueError("mine")
    elif way == "exit_after":
        sys.exit(3)


def fork_ranks(folder: Path) -> int | None:
    """Starts two ranks with their outputs in ``folder``, and prints their statuses; returns the rank in each rank."""
    folder.mkdir()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            output = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            place = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
            return rank
        pids.append(pid)
    print(folder.name, *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        if fork_ranks(Path(sys.argv[1], case)) is not None:
            name, end, is_watched = case.split(",")
            fit(name, end, is_watched == "True", Path(sys.argv[1], case))
            break
