"""What each compressor costs in quality, and what it saves until the same quality: two hosts with a slow link.

Trains the digits CNN and the small GPT for the same steps, from the same seeds and batches, with each compressor, on
two hosts of the network lab. The metric is that of the validation set: accuracy of the digits, loss of the GPT. Its
difference to the uncompressed run of the same seed is what the compressor costs; the interval is Student's, 95 % for
the mean of these differences. DiLoCo's exchanges may be compared, too, also with more steps than DDP: with "2 x steps"
the learning rate's one cycle is twice as long. "Time to equal" is the training time, without validation, until the
metric is within a tolerance of the uncompressed run's last one: what a user buys.

python benchmarks/quality.py --output benchmarks/results/quality_HARDWARE_DATE.json
python benchmarks/quality.py --tasks gpt --num-steps 3000 --hooks none int4    # a longer training
python benchmarks/quality.py --hooks none fsdp2 "fsdp2 int8" "fsdp2 int4"      # FSDP2's reduce-scatters, beside DDP
python benchmarks/quality.py --tasks gpt --rate 10mbit --hooks none int4 "diloco int4" "diloco int4, 2 x steps"
python benchmarks/quality.py --tasks gpt --rate 10mbit --delay-ms 50 --hooks none int4 "diloco int4, 2 x steps"
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
import scipy.stats
import torch
from command_line import need_lab, positive
from delayed_link import delayed_link
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from rank_results import print_result, printed_results
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt import CommOptDDP, CommOptDiLoCo, CommOptModelParallel
from lightning_commopt.launch.lab import NetLab
from lightning_commopt.train.workloads.digits import Digits, DigitsCNN
from lightning_commopt.train.workloads.gpt import GPT, StdlibSources

BASELINE = "none"
HOOKS: dict[str, Any] = {
    BASELINE: None,
    "bf16": "bf16",
    "bf16, sum in float32": {"name": "bf16", "accumulate": "float32"},
    "int8": "int8",
    "int4": "int4",
    "int4, block 64": {"name": "int4", "block_size": 64},
    "int4, error feedback": {"name": "int4", "error_feedback": True},
    "powersgd rank 1": {"name": "powersgd"},
    "powersgd rank 2": {"name": "powersgd", "matrix_rank": 2},
    "powersgd rank 4": {"name": "powersgd", "matrix_rank": 4},
    "powersgd rank 8": {"name": "powersgd", "matrix_rank": 8},
    "powersgd rank 8, start 10 %": {"name": "powersgd", "matrix_rank": 8, "start_step": 0.1},
    "powersgd rank 32, start 10 %": {"name": "powersgd", "matrix_rank": 32, "start_step": 0.1},
    "alternating rank 8, start 10 %": {"name": "alternating_powersgd", "matrix_rank": 8, "start_step": 0.1},
}
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2 bf16": {"comm_hook": "bf16"},
    "fsdp2 int8": {"comm_hook": "int8"},
    "fsdp2 int8, error feedback": {"comm_hook": {"name": "int8", "error_feedback": True}},
    "fsdp2 int8, stochastic": {"comm_hook": {"name": "int8", "stochastic_rounding": True}},
    "fsdp2 int4": {"comm_hook": "int4"},
    "fsdp2 int4, error feedback": {"comm_hook": {"name": "int4", "error_feedback": True}},
    "fsdp2 int8, int8 parameters": {"comm_hook": "int8", "param_hook": "int8"},
}
DILOCO: dict[str, dict[str, Any]] = {
    "diloco": {"outer_momentum": 0.5},
    "diloco int4": {"outer_momentum": 0.5, "comm_hook": "int4"},
    "local sgd int4": {"outer_lr": 1.0, "outer_momentum": 0.0, "comm_hook": "int4"},
}
STEP_FACTORS = (1.5, 2.0, 3.0)
"""How many times as many steps as DDP a DiLoCo plan may take to reach the same metric."""
LONGER = {f"{name}, {factor:g} x steps": (name, factor) for name in DILOCO for factor in STEP_FACTORS}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "metric": "val_accuracy",
        "higher_is_better": True,
        "tolerance": 0.002,  # of the metric
        "num_steps": 400,
    },
    "gpt": {
        "metric": "val_loss",
        "higher_is_better": False,
        "tolerance": 0.005,
        "num_steps": 600,
    },
}
NUM_CHECKS = 20


class Curve(Callback):
    """Collects the metric against steps and against seconds of training.

    Args:
        metric: name of what the model logs.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.points: list[tuple[int, float, float]] = []
        self._seconds = 0.0
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Stops the clock."""
        self._seconds += time.perf_counter() - self._start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the metric."""
        value = trainer.callback_metrics[self.metric].item()
        self.points.append((trainer.global_step, self._seconds, value))


def model_and_data(task: str) -> tuple[LightningModule, LightningDataModule]:
    """Returns what is trained, and on what."""
    if task == "digits":
        return DigitsCNN(), Digits()
    return GPT(context=64), StdlibSources(context=64)


def comm_hook(name: str, num_steps: int) -> Any:
    """Returns a hook's configuration; a share as its ``start_step`` becomes a step."""
    config = HOOKS[name]
    if isinstance(config, dict) and "start_step" in config:
        return {**config, "start_step": int(config["start_step"] * num_steps)}
    return config


def new_strategy(name: str, num_hosts: int, num_steps: int) -> CommOptDDP | CommOptModelParallel | CommOptDiLoCo:
    """Returns the strategy with a compressor."""
    if name in DILOCO:
        return CommOptDiLoCo(**DILOCO[name])
    if name in SHARDED:
        return CommOptModelParallel(data_parallel_size=num_hosts, tensor_parallel_size=1, **SHARDED[name])
    return CommOptDDP(
        comm_hook=comm_hook(name, num_steps), bucket_cap_mb=25, static_graph=True, gradient_as_bucket_view=True
    )


def train(task: str, name: str, seed: int, num_hosts: int, num_steps: int) -> dict[str, Any]:
    """Makes one run on this rank; returns its curve and the bytes it sent in a step."""
    seed_everything(seed, workers=True, verbose=False)
    model, data = model_and_data(task)
    plan, factor = LONGER.get(name, (name, 1.0))
    num_steps = round(num_steps * factor)
    curve = Curve(TASKS[task]["metric"])
    strategy = new_strategy(plan, num_hosts, num_steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=num_hosts,
        strategy=strategy,
        max_steps=num_steps,
        max_epochs=-1,
        val_check_interval=max(1, num_steps // NUM_CHECKS),
        check_val_every_n_epoch=None,
        limit_val_batches=40,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    trainer.fit(model, datamodule=data)
    return {"points": curve.points, "wire_bytes_per_step": (strategy.wire_bytes or 0) / num_steps}


def run_rank(arguments: argparse.Namespace) -> None:
    """Makes all runs of one seed in this process; rank 0 prints each as JSON."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for task in arguments.tasks:
        for name in arguments.hooks:
            num_steps = arguments.num_steps or TASKS[task]["num_steps"]
            run = train(task, name, arguments.worker, arguments.num_hosts, num_steps)
            if os.environ["RANK"] == "0":
                print_result({"task": task, "hook": name, "seed": arguments.worker, **run})


def measure(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Makes all runs, one seed after another, so that a drift of the machine hits all compressors.

    Yields:
        The runs so far, after each seed.
    """
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.num_seeds):
        delay_s = arguments.delay_ms / 1000
        with NetLab(arguments.num_hosts, arguments.rate) as lab, delayed_link(lab, delay_s) as environment:
            words = ["--worker", str(seed), "--num-hosts", str(arguments.num_hosts), "--tasks", *arguments.tasks]
            words += ["--num-steps", str(arguments.num_steps)] if arguments.num_steps else []
            command = [sys.executable, __file__, *words, "--hooks", *arguments.hooks]
            output = lab.run(command, environment=environment, pin_to_cores=True, timeout_s=arguments.timeout_s)[0]
        of_seed = list(printed_results(output.splitlines()))
        runs += of_seed
        print(f"seed {seed}: {len(of_seed)} runs", flush=True)
        yield runs


def time_to(points: list[tuple[int, float, float]], target: float, sign: int, tolerance: float) -> float | None:
    """Returns the seconds until the metric was first within a share of ``target``, or better; None if it never was."""
    worst = target * (1 - sign * tolerance)
    return next((seconds for _, seconds, value in points if sign * value >= sign * worst), None)


def interval_of_mean(differences: list[float]) -> tuple[float, float] | None:
    """Returns Student's 95 % interval; None of one value, or of values that are all the same."""
    if len(set(differences)) < 2:
        return None
    interval = scipy.stats.ttest_1samp(differences, 0).confidence_interval()
    return float(interval.low), float(interval.high)


def summary(runs: list[dict[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Returns per compressor the final metric, its difference to the uncompressed run, and times."""
    sign, tolerance = 1 if TASKS[task]["higher_is_better"] else -1, TASKS[task]["tolerance"]
    by_hook: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["task"] == task:
            by_hook.setdefault(run["hook"], {})[run["seed"]] = run
    baseline_runs = by_hook[BASELINE]
    rows = {}
    for name, of_hook in by_hook.items():
        finals = [run["points"][-1][2] for run in of_hook.values()]
        targets = {seed: run["points"][-1][2] for seed, run in baseline_runs.items()}
        times = [time_to(run["points"], targets[seed], sign, tolerance) for seed, run in of_hook.items()]
        differences = [run["points"][-1][2] - targets[seed] for seed, run in of_hook.items()]
        rows[name] = {
            "final": {"mean": float(np.mean(finals)), "min": min(finals), "max": max(finals)},
            "difference": differences,
            "difference_interval": interval_of_mean(differences),
            "training_s": float(np.median([run["points"][-1][1] for run in of_hook.values()])),
            "time_to_equal_s": None if None in times else float(np.median([t for t in times if t is not None])),
            "reached": f"{sum(t is not None for t in times)} of {len(times)}",
            "wire_bytes_per_step": float(np.mean([run["wire_bytes_per_step"] for run in of_hook.values()])),
        }
    return rows


def print_table(rows: dict[str, dict[str, Any]], task: str) -> None:
    """Prints one row a compressor."""
    table = Table(title=f"{task}: {TASKS[task]['metric']} at the end")
    for heading in (
        "comm hook",
        "final",
        "min-max",
        "to none",
        "95 % interval",
        "training s",
        "s to equal",
        "reached",
        "MB/step",
    ):
        table.add_column(heading, no_wrap=True)
    baseline = rows[BASELINE]["final"]["mean"]
    for name, row in rows.items():
        final, interval = row["final"], row["difference_interval"]
        unit, one = ("points", 0.01) if task == "digits" else ("%", baseline / 100)
        equal = "-" if row["time_to_equal_s"] is None else f"{row['time_to_equal_s']:.1f}"
        table.add_row(
            name,
            f"{final['mean']:.4f}",
            f"{final['min']:.4f}-{final['max']:.4f}",
            f"{np.mean(row['difference']) / one:+.2f} {unit}",
            "-" if interval is None else f"{interval[0] / one:+.2f} to {interval[1] / one:+.2f}",
            f"{row['training_s']:.1f}",
            equal,
            row["reached"],
            f"{row['wire_bytes_per_step'] / 1e6:.3f}",
        )
    Console(width=max(150, Console().width)).print(table)


def main() -> None:
    """Trains, prints a table for each task and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each host's link in each direction")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each packet between two hosts, one way")
    parser.add_argument("--num-seeds", type=int, default=3, help="stored after each")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num-steps", type=positive, help="of every task, instead of its own")
    parser.add_argument(
        "--hooks", nargs="+", choices=[*HOOKS, *SHARDED, *DILOCO, *LONGER], default=list(HOOKS), metavar="HOOK"
    )
    parser.add_argument("--timeout-s", type=float, default=3600, help="for the runs of one seed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_rank(arguments)
        return
    need_lab()
    if arguments.delay_ms < 0:
        parser.error(f"--delay-ms must not be negative, got {arguments.delay_ms:g}")
    if arguments.delay_ms and arguments.num_hosts != 2:
        parser.error(f"--delay-ms is for two hosts, got --num-hosts {arguments.num_hosts}")
    if BASELINE not in arguments.hooks:
        parser.error(f"--hooks must hold {BASELINE!r}, to compare with")
    load = os.getloadavg()[0]
    settings = settings_of(arguments)
    for runs in measure(arguments):
        rows = {task: summary(runs, task) for task in arguments.tasks}
        if arguments.output:
            write_result(arguments.output, {"settings": settings, "tasks": TASKS, "summary": rows, "runs": runs}, load)
    for task, of_task in rows.items():
        print_table(of_task, task)


if __name__ == "__main__":
    main()
