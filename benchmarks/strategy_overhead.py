"""Step time of CommOptDDP against Lightning's DDPStrategy with the same options, and against no DDP for one rank.

Also that of CommOptDiLoCo's steps between two exchanges, against no DDP for one rank.

Runs the variants in the same processes on the same model and data, in blocks of steps that take turns in every order,
so that a drift of the machine hits all. The baseline runs twice in each turn: its ratio to itself is the noise of the
measurement. A block counts with the 20th percentile of its steps, as other work on the machine only ever adds time.
Prints and stores the medians of the paired ratios with bootstrap 95 % intervals.

python benchmarks/strategy_overhead.py --output benchmarks/results/strategy_overhead_HARDWARE_DATE.json
Two ranks on one GPU need --device cuda --share-gpu: each pretends to be a host of its own.
"""

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import positive
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from rank_results import print_result, run_command, torchrun
from results_file import settings_of, write_result
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptDDP, CommOptDiLoCo

PAIRS = {
    "two_ranks": 2,
    "two_ranks_static_graph_bucket_view": 2,
    "one_rank": 1,
    "one_rank_diloco": 1,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "two_ranks": {},
    "two_ranks_static_graph_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "one_rank": {},
    "one_rank_diloco": {"sync_every": 30},
}


class Model(LightningModule):
    """A multilayer perceptron whose step takes a few tens of milliseconds on one core."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StepTimes(Callback):
    """Collects the seconds from one batch's end to the next one's."""

    def __init__(self, num_warmup_steps: int) -> None:
        self.num_warmup_steps = num_warmup_steps
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Takes the time when the device has done what it was given."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> np.ndarray:
        """``(steps,)`` without the warm-up."""
        return np.diff(np.array(self.ends))[self.num_warmup_steps :]


def strategy_of(variant: str, pair: str, device: str) -> Strategy:
    """Returns the strategy of one side: ours, or the one to compare with."""
    if variant == "commopt":
        return CommOptDiLoCo(**OPTIONS[pair]) if pair == "one_rank_diloco" else CommOptDDP(**OPTIONS[pair])
    return SingleDeviceStrategy(torch.device(device, 0)) if PAIRS[pair] == 1 else DDPStrategy(**OPTIONS[pair])


def block_seconds(variant: str, pair: str, arguments: argparse.Namespace) -> float:
    """Fits one block and returns the 20th percentile of its steps, in seconds."""
    times = StepTimes(num_warmup_steps=5)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 512, generator=generator), torch.randint(0, 10, (4096,)))
    num_hosts = PAIRS[pair] if arguments.share_gpu else 1
    trainer = Trainer(
        accelerator=arguments.device,
        devices=PAIRS[pair] // num_hosts,
        num_nodes=num_hosts,
        strategy=strategy_of(variant, pair, arguments.device),
        max_steps=arguments.num_steps + 6,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(Model(), DataLoader(data, batch_size=128))
    return float(np.percentile(times.seconds, 20))


def run_rank(arguments: argparse.Namespace) -> None:
    """Runs the blocks of one pair on this rank; rank 0 prints the seconds as JSON."""
    pair, rank = arguments.pair, int(os.environ.get("RANK", "0"))
    if arguments.share_gpu and PAIRS[pair] > 1:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    if arguments.device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    seconds: dict[str, list[float]] = {"commopt": [], "baseline": [], "baseline_again": []}
    block_seconds("baseline", pair, arguments)  # warms the process up
    for order in itertools.islice(itertools.cycle(itertools.permutations(seconds)), arguments.num_turns):
        for variant in order:
            seconds[variant].append(block_seconds(variant, pair, arguments))
    if rank == 0:
        print_result(seconds)


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the medians of the paired ratios with bootstrap 95 % intervals, and the medians in seconds."""
    baseline = np.array(seconds["baseline"])
    result: dict[str, Any] = {"turns": len(baseline)}
    for variant in ("commopt", "baseline_again"):
        ratios = np.array(seconds[variant]) / baseline
        draws = np.random.default_rng(0).integers(0, len(ratios), (10000, len(ratios)))
        low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
        result[f"{variant}_ratio"] = {"median": float(np.median(ratios)), "low_95": float(low), "high_95": float(high)}
    return result | {f"{variant}_s": float(np.median(values)) for variant, values in seconds.items()}


def main() -> None:
    """Runs all pairs, each in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=positive, default=60)
    parser.add_argument("--num-steps", type=positive, default=25, help="timed steps in a block")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="both ranks on GPU 0, as hosts of their own")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pair", choices=PAIRS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pair:
        run_rank(arguments)
        return
    load, results = os.getloadavg()[0], dict[str, Any]()
    for pair in arguments.pairs:
        words = [__file__, "--pair", pair, *sys.argv[1:]]
        command = torchrun(PAIRS[pair], *words) if PAIRS[pair] > 1 else [sys.executable, *words]
        results[pair] = summary(run_command(command))
        print(pair, json.dumps(results[pair]), flush=True)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments, "pair"), **results}, load)


if __name__ == "__main__":
    main()
