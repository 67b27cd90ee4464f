"""How long jobs of two ranks take to end after a SIGTERM at a random time, and whether they save a checkpoint.

torchrun passes the signal on to both ranks, and kills them after 30 s. A step of a rank takes up to 0.1 s, at random,
so that ranks are in different places, as where they wait for data. Strategies take turns; no speed is measured.

python benchmarks/sigterm.py --num-runs 12 --output benchmarks/results/sigterm_HARDWARE_DATE.json
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from results_file import settings_of, write_result
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP

STRATEGIES = ("ddp", "commopt")
_START_LIMIT_S = 120.0


class Model(LightningModule):
    """A small MLP whose steps take different times; rank 0 creates a file when training is under way."""

    def __init__(self, started: Path) -> None:
        super().__init__()
        self.started = started
        self.layers = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 5 and self.trainer.is_global_zero:
            self.started.touch()
        time.sleep(random.uniform(0, 0.1))
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def train(strategy: str, folder: Path) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CommOptDDP() if strategy == "commopt" else strategy,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(folder)],
    )
    trainer.fit(Model(folder / "started"), DataLoader(TensorDataset(torch.randn(512, 512)), batch_size=8))


def run_job(strategy: str, delay_s: float) -> dict[str, Any]:
    """Starts a job and ends it ``delay_s`` after training has begun; returns what became of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        with open(folder / "output", "w") as output:
            job = subprocess.Popen(
                [*torchrun, __file__, "--worker", strategy, name],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while not (folder / "started").exists():
            if job.poll() is not None or time.monotonic() > deadline:
                job.kill()
                raise RuntimeError(f"The job has not begun to train: {(folder / 'output').read_text()[-2000:]}")
            time.sleep(0.01)
        time.sleep(delay_s)
        sent_at = time.monotonic()
        job.terminate()
        job.wait()
        end_s = time.monotonic() - sent_at
        return {"strategy": strategy, "end_s": end_s, "has_saved": (folder / "on_exception.ckpt").exists()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-runs", type=int, default=12, help="jobs of each strategy")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, metavar=("STRATEGY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker[0], Path(arguments.worker[1]))
        return
    load, draw, jobs = os.getloadavg()[0], random.Random(arguments.seed), []
    for _ in range(arguments.num_runs):
        delay_s = draw.uniform(0, 2)
        for strategy in STRATEGIES:
            jobs.append(run_job(strategy, delay_s))
            print(jobs[-1], flush=True)
    for strategy in STRATEGIES:
        own = [job for job in jobs if job["strategy"] == strategy]
        times, num_saved = sorted(job["end_s"] for job in own), sum(job["has_saved"] for job in own)
        print(f"{strategy}: {num_saved} of {len(own)} saved; {times[0]:.1f} to {times[-1]:.1f} s")
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments), "jobs": jobs}, load)


if __name__ == "__main__":
    main()
