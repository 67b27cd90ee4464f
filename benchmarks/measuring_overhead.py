"""What measuring costs: the step of a small GPT with our callbacks, with other profilers, and with none.

Runs the variants in the same processes, in blocks of a fixed number of steps that take turns in every order, so that a
drift of the machine hits all. The reference runs twice in each turn: its difference to itself is the noise of the
measurement. A block counts with the 20th percentile of its steps, as other work on the machine only ever adds time.
Prints and stores the medians of the paired differences per step with bootstrap 95 % intervals. No profiler is attached
to the process; the window of CUDAProfilerWindow never opens.

python benchmarks/measuring_overhead.py --output benchmarks/results/measuring_overhead_HARDWARE_DATE.json
python benchmarks/measuring_overhead.py --device cuda --output ...
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from results_file import median_with_interval, write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeLogger, CUDAProfilerWindow, NVTXRanges
from lightning_commopt.workloads.gpt import GPT, StdlibSources

RESULT = "RESULT "
REFERENCE = "off"
NEVER = 10**9
ALL_THREE = "all three callbacks"
VARIANTS = (
    REFERENCE,
    "off, again",
    ALL_THREE,
    "CommTimeLogger",
    "NVTXRanges",
    "CUDAProfilerWindow",
    "Lightning's SimpleProfiler",
    "Lightning's AdvancedProfiler",
    "torch.profiler",
)


class StepTimes(Callback):
    """Collects the seconds from one batch's end to the next one's.

    Args:
        num_warmup_steps: that do not count.
    """

    def __init__(self, num_warmup_steps: int) -> None:
        self.num_warmup_steps = num_warmup_steps
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Takes the time."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> np.ndarray:
        """``(steps,)`` without the warm-up."""
        return np.diff(np.array(self.ends))[self.num_warmup_steps :]


def callbacks_of(variant: str, folder: str) -> list[Callback]:
    """Returns what measures in a variant."""
    comm_time = CommTimeLogger(every_n_steps=10, dirpath=folder, print_summary=False)
    ours = {
        "CommTimeLogger": comm_time,
        "NVTXRanges": NVTXRanges(),
        "CUDAProfilerWindow": CUDAProfilerWindow(start_step=NEVER, num_steps=1),
    }
    return list(ours.values()) if variant == ALL_THREE else [ours[variant]] if variant in ours else []


def profiler_of(variant: str, folder: str) -> Any:
    """Returns what Lightning is to profile with in a variant."""
    if variant == "Lightning's SimpleProfiler":
        return SimpleProfiler(dirpath=folder, filename="simple")
    if variant == "Lightning's AdvancedProfiler":
        return AdvancedProfiler(dirpath=folder, filename="advanced")
    if variant == "torch.profiler":
        return PyTorchProfiler(
            dirpath=folder,
            filename="torch",
            export_to_chrome=False,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=10_000),
        )
    return None


def block_seconds(variant: str, arguments: argparse.Namespace) -> float:
    """Fits one block and returns the 20th percentile of its steps, in seconds."""
    times = StepTimes(num_warmup_steps=5)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=arguments.device,
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=CommOptDDP(),
            max_steps=arguments.num_steps + 6,
            max_epochs=-1,
            limit_val_batches=0,
            logger=CSVLogger(folder, name="", version="csv"),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            profiler=profiler_of(variant, folder),
            callbacks=[*callbacks_of(variant, folder), times],
        )
        trainer.fit(GPT(context=64), StdlibSources(context=64, batch_size=arguments.batch_size))
    return float(np.percentile(times.seconds, 20))


def run_rank(arguments: argparse.Namespace) -> None:
    """Runs all blocks on this rank; rank 0 prints the seconds as JSON."""
    rank = int(os.environ["LOCAL_RANK"])
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    seconds: dict[str, list[float]] = {variant: [] for variant in arguments.variants}
    block_seconds(REFERENCE, arguments)  # warms the process up
    generator = np.random.default_rng(0)  # the same on all ranks
    for _ in range(arguments.num_turns):
        for index in generator.permutation(len(arguments.variants)):
            variant = arguments.variants[index]
            seconds[variant].append(block_seconds(variant, arguments))
    if rank == 0:
        print(RESULT + json.dumps(seconds), flush=True)


def summary(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Returns for each variant the paired differences to the reference, in seconds and as a share of its step."""
    reference = np.array(seconds[REFERENCE])
    rows = {}
    for variant, values in seconds.items():
        differences = np.array(values) - reference
        rows[variant] = {
            "step_s": float(np.median(values)),
            "added_s": median_with_interval(differences.tolist()),
            "added_share": median_with_interval((differences / reference).tolist()),
        }
    return rows


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Prints one row a variant."""
    table = Table(title="added to each step, median of paired differences and 95 % interval")
    for heading in ("measuring with", "step, ms", "added, us", "95 %", "added, %", "95 %"):
        table.add_column(heading, justify="left" if heading == "measuring with" else "right", no_wrap=True)
    for variant, row in rows.items():
        cells = [variant, f"{1e3 * row['step_s']:.2f}"]
        for key, factor, digits in (("added_s", 1e6, 0), ("added_share", 100, 2)):
            median, low, high = (factor * row[key][part] for part in ("median", "low_95", "high_95"))
            cells += [f"{median:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
        table.add_row(*cells)
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Runs all blocks, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=int, default=20)
    parser.add_argument("--num-steps", type=int, default=40, help="timed steps in a block")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch of one rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if REFERENCE not in arguments.variants:
        parser.error(f"--variants must hold {REFERENCE!r}, to compare with")
    if arguments.worker:
        run_rank(arguments)
        return
    load = os.getloadavg()[0]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.num_ranks)]
    command = [sys.executable, *launcher, __file__, "--worker", *sys.argv[1:]]
    said = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    seconds = json.loads(next(line for line in said.splitlines() if line.startswith(RESULT)).removeprefix(RESULT))
    rows = summary(seconds)
    print_table(rows)
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "worker")}
        write_result(arguments.output, {"settings": settings, "summary": rows, "seconds": seconds}, load)


if __name__ == "__main__":
    main()
