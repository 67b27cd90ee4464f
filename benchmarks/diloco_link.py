"""Seconds of a step with DiLoCo on two hosts with slow links, beside DDP, and which share of it is computing.

Makes the hosts on this machine (`lightning_commopt.launch.lab`), one rank on each, every rank on a core of its own with
one thread. Plans take turns, A B C A B C, so that a drift of the machine hits all. Each turn is a fit of a Trainer in
fresh processes on a batch of random images. What is timed of DiLoCo are whole rounds, after a first one. The slower
rank counts: ranks that exchange something wait for it, and others must not seem faster by that. The share of computing
is the step without any exchange over the plan's. Processor seconds of a step, the mean over the ranks, tell what an
exchange computes, whatever the link.

python benchmarks/diloco_link.py --output benchmarks/results/diloco_link_HARDWARE_DATE.json
python benchmarks/diloco_link.py --model vit_l_32 --rates 100mbit --plans none diloco_int4 streaming_int4 --num-turns 1
"""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import link_rate, need_lab, positive
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rank_results import print_result, printed_results
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models import get_model
from two_hosts import vit_tiny

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.launch.lab import NetLab, RankError

NO_EXCHANGE = "none"
DDP_PLANS: dict[str, dict[str, Any]] = {"ddp": {}, "int4": {"comm_hook": "int4"}}
DILOCO_PLANS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "diloco_int4": {"comm_hook": "int4"},
    "streaming_int4": {"comm_hook": "int4", "fragments": 4, "overlap": 5},
}
PLANS = (NO_EXCHANGE, *DDP_PLANS, *DILOCO_PLANS)


class ImageModel(LightningModule):
    """A classifier of 224 x 224 images, trained with SGD on the same random batch in every step."""

    def __init__(self, name: str, batch_size: int, num_steps: int) -> None:
        super().__init__()
        self.net = vit_tiny() if name == "vit_tiny" else get_model(name, weights=None)
        self.batch = torch.randn(batch_size, 3, 224, 224), torch.randint(0, 1000, (batch_size,))
        self.num_steps = num_steps

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(2 * self.num_steps), batch_size=1)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.batch[0]), self.batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepEnds(Callback):
    """Notes when steps end, and the processor time of all threads until then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains as one rank, which prints the mean seconds and processor seconds of its timed steps as JSON."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    name, ends = arguments.worker, StepEnds()
    num_warmup_steps, num_steps = arguments.num_warmup_steps, arguments.num_steps
    strategy: CommOptDDP | CommOptDiLoCo
    if name in DDP_PLANS:
        strategy = CommOptDDP(**DDP_PLANS[name], bucket_cap_mb=25, static_graph=True, gradient_as_bucket_view=True)
    elif name in DILOCO_PLANS:
        strategy = CommOptDiLoCo(sync_every=arguments.sync_every, outer_momentum=0.5, **DILOCO_PLANS[name])
        num_warmup_steps, num_steps = arguments.sync_every, arguments.sync_every * arguments.num_rounds
    else:
        strategy = CommOptDiLoCo(sync_every=10**9)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_steps=num_warmup_steps + num_steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ends],
    )
    trainer.fit(ImageModel(arguments.model, arguments.batch_size, num_warmup_steps + num_steps))
    steps_s = np.diff(ends.seconds[num_warmup_steps - 1 :]).tolist()
    cpu_s = np.diff(ends.cpu_s[num_warmup_steps - 1 :]).tolist()
    result = {
        "step_s": float(np.mean(steps_s)),
        "cpu_s": float(np.mean(cpu_s)),
        "steps_s": steps_s,
        "cpus_s": cpu_s,
    }
    print_result(result)


def measure(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Makes all runs; yields those so far, after each."""
    runs: list[dict[str, Any]] = []
    numbers = ("batch_size", "num_warmup_steps", "num_steps", "num_rounds", "sync_every")
    words = [word for key in numbers for word in (f"--{key.replace('_', '-')}", str(getattr(arguments, key)))]
    for turn in range(arguments.num_turns):
        for rate in arguments.rates:
            for name in arguments.plans:
                with NetLab(2, rate) as lab:
                    command = [sys.executable, __file__, "--worker", name, "--model", arguments.model, *words]
                    try:
                        outputs = lab.run(command, pin_to_cores=True, timeout_s=arguments.timeout_s)
                    except RankError as error:
                        print(f"{name} at {rate}: {error}", file=sys.stderr, flush=True)
                        continue
                ranks = [next(printed_results(output.splitlines())) for output in outputs]
                step_s, cpu_s = max(rank["step_s"] for rank in ranks), np.mean([rank["cpu_s"] for rank in ranks])
                run = {"turn": turn, "rate": rate, "plan": name, "step_s": step_s, "cpu_s": float(cpu_s)}
                runs.append({**run, "ranks": ranks})
                print(f"turn {turn + 1}, {rate}, {name}: {step_s:.3f} s", flush=True)
                yield runs


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each plan and rate: seconds of a step, and the share of computing in it."""
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu_s: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        seconds.setdefault((run["rate"], run["plan"]), []).append(run["step_s"])
        cpu_s.setdefault((run["rate"], run["plan"]), []).append(run["cpu_s"])
    rows = []
    for (rate, plan), values in seconds.items():
        step_s = float(np.median(values))
        row = {"rate": rate, "plan": plan, "step_s": step_s, "min": min(values), "max": max(values)}
        row["cpu_s"] = float(np.median(cpu_s[rate, plan]))
        if alone := seconds.get((rate, NO_EXCHANGE)):
            row["computing"] = float(np.median(alone)) / step_s
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Prints a row for each plan and rate."""
    table = Table("rate", "plan", "s/step", "min-max", "processor s", "computing", title=title)
    for row in rows:
        share = f"{row['computing']:.1%}" if "computing" in row else "-"
        span = f"{row['min']:.3f}-{row['max']:.3f}"
        table.add_row(row["rate"], row["plan"], f"{row['step_s']:.3f}", span, f"{row['cpu_s']:.3f}", share)
    Console(width=max(100, Console().width)).print(table)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=link_rate, default=["10mbit", "100mbit", "1gbit"], help="each way")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--model", default="vit_tiny", help="'vit_tiny', or any of torchvision for 224 x 224 images")
    parser.add_argument("--batch-size", type=positive, default=2, help="images in a batch of one rank")
    parser.add_argument("--num-warmup-steps", type=positive, default=3, help="of plans without rounds")
    parser.add_argument("--num-steps", type=positive, default=10, help="timed steps of plans without rounds")
    parser.add_argument("--num-rounds", type=positive, default=2, help="timed rounds of DiLoCo")
    parser.add_argument("--sync-every", type=positive, default=30, help="steps of a round of DiLoCo")
    parser.add_argument("--num-turns", type=positive, default=3)
    parser.add_argument("--timeout-s", type=float, default=1800, help="for one run")
    parser.add_argument("--output", type=Path, help="stored after each run")
    parser.add_argument("--worker", choices=PLANS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures the plans, prints a table and stores the result."""
    arguments = parse()
    if arguments.worker:
        run_rank(arguments)
        return
    need_lab()
    load, rows = os.getloadavg()[0], list[dict[str, Any]]()
    for runs in measure(arguments):
        rows = summary(runs)
        if arguments.output:
            write_result(arguments.output, {"settings": settings_of(arguments), "summary": rows, "runs": runs}, load)
    print_table(rows, f"{arguments.model}, two hosts, sync_every={arguments.sync_every}")


if __name__ == "__main__":
    main()
