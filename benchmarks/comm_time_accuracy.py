"""Whether CommTimeMonitor tells the truth: exposed communication, and the rank that the others wait for.

On hosts of the network lab, one rank on each, pinned to a core.

Exposed: blocks of steps with gradient sync and with a hook that sends nothing take turns. The difference between the
two is what gradient sync adds to a step; it is compared with the exposed time that the callback measured.

Stragglers: in each trial, a window of steps, one rank drawn at random sleeps before every forward for a share of the
step, or none does. Counted is how often the callback names the right rank, and how often one that does not sleep. A
core may be slow for a second by itself, on a virtual machine above all: so the forward passes, in which no rank waits
for another, are timed apart, and it is counted how often a rank that was named without sleeping was no slower in them.

python benchmarks/comm_time_accuracy.py --output benchmarks/results/comm_time_accuracy_HARDWARE_DATE.json
"""

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from command_line import need_lab
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from rank_results import print_result, run_in_lab
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table
from small_gpt import train_gpt
from torch_hooks import keep

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor

SLOWER = 1.1
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, buckets of 0.25 MiB": {"bucket_cap_mb": 0.25},
    "bf16": {"comm_hook": "bf16", "bucket_cap_mb": 0.25},
    "int8": {"comm_hook": "int8", "bucket_cap_mb": 0.25},
    "powersgd, rank 2": {"comm_hook": {"name": "powersgd", "matrix_rank": 2}},
}


class Collected(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        """Of no use."""
        return "collected"

    @property
    def version(self) -> int:
        """Of no use."""
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Keeps a window of CommTimeMonitor's."""
        if "comm_time/step_s" in metrics:
            self.windows.append(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keeps nothing."""


class Sleeps(Callback):
    """Makes a rank slow for whole windows.

    Args:
        ranks: the slow rank of each window, or -1.
        shares: of a step, that it sleeps.
        num_steps: in a window.
        step_s: of a quiet step.
    """

    def __init__(self, ranks: list[int], shares: list[float], num_steps: int, step_s: float) -> None:
        self.ranks, self.shares, self.num_steps, self.step_s = ranks, shares, num_steps, step_s

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Sleeps, if it is this rank's turn."""
        window = trainer.global_step // self.num_steps
        if window < len(self.ranks) and self.ranks[window] == trainer.global_rank:
            time.sleep(self.shares[window] * self.step_s)


class ForwardTimes(Callback):
    """Collects the seconds of every forward pass of this rank in ``seconds``."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.started = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Starts the clock."""
        self.started = time.perf_counter()

    def on_before_backward(self, *args: Any) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self.started)

    def slowest_over_others(self, num_steps: int) -> list[list[float]]:
        """Returns for each window and rank the median of its forward passes over the least of the other ranks'."""
        of_rank = torch.tensor(self.seconds).view(-1, num_steps).median(dim=1).values
        of_ranks = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, of_rank)
        medians = torch.stack(of_ranks, dim=1)
        least_of_others = [
            torch.cat([medians[:, :rank], medians[:, rank + 1 :]], dim=1).amin(dim=1) for rank in range(len(of_ranks))
        ]
        return (medians / torch.stack(least_of_others, dim=1)).tolist()


def fit(
    arguments: argparse.Namespace, strategy: CommOptDDP, num_steps: int, comm_time: CommTimeMonitor, *others: Any
) -> list[dict[str, float]]:
    """Trains, and returns what was logged of each window."""
    collected = Collected()
    torch.manual_seed(0)
    train_gpt(
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        accelerator="cpu",
        devices=1,
        num_nodes=arguments.num_hosts,
        strategy=strategy,
        logger=collected,
        callbacks=[comm_time, *others],
    )
    return collected.windows


def exposed_trials(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Returns for each plan and turn the seconds of a step with and without communication, and its exposed time."""
    trials: dict[str, list[dict[str, float]]] = {name: [] for name in PLANS}

    def block(strategy: CommOptDDP) -> dict[str, float]:
        comm_time = CommTimeMonitor(every_n_steps=10, save_records=False, print_summary=False)
        fit(arguments, strategy, arguments.num_steps + 10, comm_time)
        return comm_time.summary

    for _ in range(arguments.num_turns):
        for name, options in PLANS.items():
            without = [block(CommOptDDP(ddp_comm_hook=keep, bucket_cap_mb=options.get("bucket_cap_mb")))]
            with_sync = block(CommOptDDP(**options))
            without.append(block(CommOptDDP(ddp_comm_hook=keep, bucket_cap_mb=options.get("bucket_cap_mb"))))
            trials[name].append(
                {
                    "with_s": with_sync["step_s"],
                    "without_s": float(np.mean([summary["step_s"] for summary in without])),
                    "exposed_s": with_sync["exposed_s"],
                }
            )
    return trials


def straggler_trials(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Returns for each window which rank was slow by which share, and which one was named."""
    num_steps = arguments.num_steps_in_window

    def comm_time() -> CommTimeMonitor:
        return CommTimeMonitor(
            every_n_steps=num_steps, num_warmup_steps=0, log="all", save_records=False, print_summary=False
        )

    quiet = fit(arguments, CommOptDDP(), 5 * num_steps, comm_time())
    step_s = torch.tensor(float(np.median([window["comm_time/step_s"] for window in quiet[1:]])))
    generator = np.random.default_rng(0)  # the same on all ranks
    slow = generator.integers(0, arguments.num_hosts, arguments.num_trials).tolist()
    ranks = [rank for slow_rank in slow for rank in (slow_rank, -1)]
    shares = generator.uniform(0.2, 0.5, len(ranks)).tolist()
    ranks, shares = [-1, *ranks], [0.0, *shares]  # the first window warms up
    sleeps = Sleeps(ranks, shares, num_steps, step_s.item())
    forward = ForwardTimes()
    windows = fit(arguments, CommOptDDP(), len(ranks) * num_steps, comm_time(), sleeps, forward)
    ratios = forward.slowest_over_others(num_steps)
    trials = []
    for rank, share, window, ratio in list(zip(ranks, shares, windows, ratios, strict=True))[1:]:
        named = int(window["comm_time/straggler_rank"])
        trials.append(
            {
                "slow": rank,
                "share": share if rank >= 0 else 0.0,
                "named": named,
                "slowdown": window["comm_time/straggler_slowdown"],
                "forward_of_named_over_others": ratio[named] if named >= 0 else 0.0,
            }
        )
    return trials


def run_rank(arguments: argparse.Namespace) -> None:
    """Makes all trials on this rank; rank 0 prints them as JSON."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result = exposed_trials(arguments) if arguments.worker == "exposed" else straggler_trials(arguments)
    if os.environ["RANK"] == "0":
        print_result(result)


def measure(part: str, rate: str, arguments: argparse.Namespace) -> Any:
    """Runs the ranks of one part in a lab of their own."""
    words = [__file__, "--worker", part, *sys.argv[1:]]
    return run_in_lab(arguments.num_hosts, rate, words, arguments.timeout_s)


def exposed_summary(trials: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns the medians over turns, and of the ratio of what was measured within to what it is from outside."""
    rows = {}
    for name, turns in trials.items():
        ratios = [turn["exposed_s"] / (turn["with_s"] - turn["without_s"]) for turn in turns]
        rows[name] = {
            **{key: float(np.median([turn[key] for turn in turns])) for key in turns[0]},
            "ratio": float(np.median(ratios)),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
        }
    return rows


def print_exposed(rows: dict[str, dict[str, float]], rate: str) -> None:
    """Prints one row a plan."""
    table = Table(title=f"exposed communication, ms a step, {rate}")
    for heading in ("plan", "step", "no communication", "difference", "exposed", "exposed / difference", "min to max"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    for name, row in rows.items():
        times = [row["with_s"], row["without_s"], row["with_s"] - row["without_s"], row["exposed_s"]]
        spread = f"{row['least_ratio']:.3f} to {row['most_ratio']:.3f}"
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in times), f"{row['ratio']:.3f}", spread)
    Console(width=max(140, Console().width)).print(table)


def straggler_summary(trials: list[dict[str, float]]) -> dict[str, int]:
    """Returns how many trials there were of each kind, and how many ended well."""
    slow = [trial for trial in trials if trial["slow"] >= 0]
    quiet = [trial for trial in trials if trial["slow"] < 0]
    alarms = [trial for trial in quiet if trial["named"] >= 0]
    return {
        "num_slow": len(slow),
        "num_right": sum(trial["named"] == trial["slow"] for trial in slow),
        "num_quiet": len(quiet),
        "num_alarms_without_sleep": len(alarms),
        "num_of_these_not_slower_in_forward": sum(t["forward_of_named_over_others"] < SLOWER for t in alarms),
    }


def main() -> None:
    """Makes the trials, prints what came of them and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-hosts", type=int, default=2)
    parser.add_argument("--rate", default="200mbit", help="of each host's link where the exposed time is measured")
    parser.add_argument("--straggler-rate", default="1gbit", help="of each host's link where stragglers are looked for")
    parser.add_argument("--num-turns", type=int, default=5, help="blocks of each plan")
    parser.add_argument("--num-steps", type=int, default=40, help="in a block, after 10 of warm-up")
    parser.add_argument("--num-trials", type=int, default=200, help="windows with a slow rank, and as many without")
    parser.add_argument("--num-steps-in-window", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a batch of one rank")
    parser.add_argument("--parts", nargs="+", choices=("exposed", "stragglers"), default=["exposed", "stragglers"])
    parser.add_argument("--timeout-s", type=float, default=3600, help="for one part")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=("exposed", "stragglers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(arguments)
        return
    need_lab()
    load = os.getloadavg()[0]
    result: dict[str, Any] = {}
    if "exposed" in arguments.parts:
        trials = measure("exposed", arguments.rate, arguments)
        result["exposed"] = {"summary": exposed_summary(trials), "trials": trials}
        print_exposed(result["exposed"]["summary"], arguments.rate)
    if "stragglers" in arguments.parts:
        trials = measure("stragglers", arguments.straggler_rate, arguments)
        result["stragglers"] = {"summary": straggler_summary(trials), "trials": trials}
        print(result["stragglers"]["summary"])
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments), **result}, load)


if __name__ == "__main__":
    main()
