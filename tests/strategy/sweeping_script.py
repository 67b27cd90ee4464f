"""A Hydra application whose job fails in a way that its configuration names; run by ``test_multirun``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore

from lightning_commopt import CommOptDDP, CommOptModelParallel, shard
from lightning_commopt.callbacks import CommTimeMonitor, SpeedMonitor
from support.strategy_models import Tiny, loader, trainer


@dataclass
class Job:
    """``fault`` is where the job fails, and with what; ``rank`` which rank does, -1 for all."""

    kind: str = "ddp"
    fault: str = ""
    rank: int = -1
    has_callbacks: bool = False


ConfigStore.instance().store("job", Job)


class Failing(Tiny):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def fail(self, place: str) -> None:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        if not self.job.fault.startswith(f"{place} ") or self.job.rank not in (-1, rank):
            return
        if "late" in self.job.fault and rank == 0:
            time.sleep(7)  # Lightning's observer looks every 5 s
        if "exit" in self.job.fault:
            sys.exit(int(self.job.fault.split()[-1]))
        raise ArithmeticError(f"broken {place}")

    def train_dataloader(self) -> Any:
        return loader()

    def configure_model(self) -> None:
        if self.job.kind == "fsdp2":
            shard(self, self.device_mesh, blocks=torch.nn.Linear)

    def configure_callbacks(self) -> list[Any]:
        self.fail("before")  # ranks have been started, and have no process group yet
        return []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.fail("in")
        return self.loss(batch)


@hydra.main(version_base=None, config_name="job")
def main(job: Job) -> None:
    torch.set_num_threads(1)
    callbacks = [CommTimeMonitor(), SpeedMonitor()] if job.has_callbacks else []
    model = Failing(job)
    for _ in range(2 if "second" in job.fault else 1):
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        strategy = CommOptDDP() if job.kind == "ddp" else CommOptModelParallel(**sizes)  # type: ignore[arg-type]
        run = trainer(strategy, callbacks=callbacks, devices=2, max_epochs=1)
        run.fit(model)
    model.fail("after")
    if run.global_rank == 0:
        print(f"JOB DONE {job.fault!r} in {run.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
