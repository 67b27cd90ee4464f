"""What measuring costs: the step of a small GPT with our callbacks, with other profilers, and with none.

Our callbacks are switched on and off within one fit, in blocks of a few steps that take turns in every order; with each
block the model is wrapped anew, as DDP's own all-reduce is made from a hook only where it is watched. Other profilers
cannot be switched: they and the baseline have fits of their own, which take turns. A block counts with the median of
its steps. In both parts the baseline comes twice: its difference to itself is the noise of the measurement. Prints and
stores the medians of the differences to the baseline of the same turn, with bootstrap 95 % intervals.

Other work on the machine may hide a few tenths of a millisecond. So our blocks count a second time, by the processor
time of the whole process, all its threads. And a third part adds up the processor time that threads spend in our code:
in the callbacks, the ends of windows included, and in the hooks of process groups; where torch has none of those, in
DDP's hook, with the start of the all-reduce, which DDP would have to make as well. No profiler is attached to the
process; the window of CUDAProfilerWindow never opens. The same under FSDP2, with three collectives for each layer.

python benchmarks/measuring_overhead.py --output benchmarks/results/measuring_overhead_HARDWARE_DATE.json
python benchmarks/measuring_overhead.py --device cuda --output ...
torchrun's ranks on one GPU need --share-gpu: each pretends to be a host of its own.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_results import print_result, run_command, torchrun
from results_file import median_with_interval, settings_of, write_result
from rich.console import Console
from rich.table import Table
from small_gpt import train_gpt

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, CUDAProfilerWindow, HangMonitor, NVTXRanges
from lightning_commopt.compat import collectives
from lightning_commopt.measure.marks import IssuedCollective
from lightning_commopt.measure.observer import SyncObserver
from lightning_commopt.sync.ddp.observed import ObservedAllReduce, observe, stop_observing
from lightning_commopt.sync.ddp.observed_reducer import _IssuedBucket

NEVER = 10**9
BASELINE = "off"
OURS = (BASELINE, "off, again", "all three callbacks", "CommTimeMonitor", "HangMonitor", "NVTXRanges")
PEERS = (BASELINE, "off, again", "Lightning's SimpleProfiler", "Lightning's AdvancedProfiler", "torch.profiler")
NUM_SETTLING_STEPS = 4
HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)


def now_s(trainer: Trainer) -> float:
    """Returns the time when the device has done what it was given."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class StepTimes(Callback):
    """Collects the end of every batch in ``ends``, and this process's processor time until then in ``processor``."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.processor: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Takes the time."""
        self.ends.append(now_s(trainer))
        self.processor.append(time.process_time())


class Switch(Callback):
    """Lets variants take turns, each with the callbacks that it has.

    Args:
        variants: callbacks by variant.
        order: the variants in the order of blocks.
        num_steps: in a block.
    """

    def __init__(self, variants: dict[str, list[Callback]], order: list[str], num_steps: int) -> None:
        self.variants, self.order, self.num_steps = variants, order, num_steps
        self.always: list[Callback] = []
        self.watching: dict[str, list[SyncObserver]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds out which observers watch the gradient sync in which variant."""
        self.always = list(trainer.callbacks)  # type: ignore[attr-defined]
        for name, callbacks in self.variants.items():
            for callback in callbacks:
                callback.setup(trainer, pl_module, stage)
            self.watching[name] = list(trainer.strategy.sync_observers)  # type: ignore[attr-defined]
            for observer in self.watching[name]:
                stop_observing(trainer.strategy, observer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepares all callbacks, in the same order on all ranks."""
        for callbacks in self.variants.values():
            for callback in callbacks:
                callback.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Changes the variant where a block begins."""
        block, step = divmod(trainer.global_step, self.num_steps)
        if step or block >= len(self.order):
            return
        strategy, name = trainer.strategy, self.order[block]
        assert isinstance(strategy, CommOptDDP)
        for observer in list(strategy.sync_observers):
            stop_observing(strategy, observer)
        for observer in self.watching[name]:
            observe(strategy, observer)
        strategy.apply_plan(strategy.plan)
        trainer.callbacks = [*self.always, *self.variants[name]]  # type: ignore[attr-defined]


def our_callbacks(variant: str, folder: str) -> list[Callback]:
    """Returns what measures in a variant of ours."""
    comm_time = CommTimeMonitor(dirpath=f"{folder}/{variant}", print_summary=False)
    if variant == "CommTimeMonitor":
        return [comm_time]
    if variant == "HangMonitor":
        return [HangMonitor(after_s=NEVER, dirpath=folder)]
    if variant == "NVTXRanges":
        return [NVTXRanges()]
    if variant == "all three callbacks":
        return [comm_time, NVTXRanges(), CUDAProfilerWindow(start_step=NEVER, num_steps=1)]
    return []


def peer(variant: str, folder: str) -> Any:
    """Returns what Lightning is to profile with in a variant."""
    if variant == "Lightning's SimpleProfiler":
        return SimpleProfiler(dirpath=folder, filename="simple")
    if variant == "Lightning's AdvancedProfiler":
        return AdvancedProfiler(dirpath=folder, filename="advanced")
    if variant == "torch.profiler":
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=NEVER)
        return PyTorchProfiler(dirpath=folder, filename="torch", export_to_chrome=False, schedule=schedule)
    return None


def sharding() -> ModelParallelStrategy:
    """Returns FSDP2 over all ranks."""
    return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)


def fit(
    arguments: argparse.Namespace,
    num_steps: int,
    folder: str,
    callbacks: list[Callback],
    profiler: Any = None,
    num_sharded_layers: int = 0,
) -> None:
    """Trains for so many steps: in DDP, or if so many layers are given, each sharded by FSDP2."""
    train_gpt(
        num_steps=num_steps,
        batch_size=arguments.batch_size,
        num_layers=num_sharded_layers or 2,
        accelerator=arguments.device,
        devices=1 if arguments.share_gpu else int(os.environ["WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) if arguments.share_gpu else 1,
        strategy=sharding() if num_sharded_layers else CommOptDDP(),
        logger=CSVLogger(folder, name="", version="csv"),
        log_every_n_steps=10,
        profiler=profiler,
        callbacks=callbacks,
    )


def time_ours(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Returns for each turn the seconds of a step in each variant, and its seconds on the processor."""
    generator = np.random.default_rng(0)  # the same on all ranks
    order = [OURS[index] for _ in range(arguments.num_turns + 1) for index in generator.permutation(len(OURS))]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        variants = {name: our_callbacks(name, folder) for name in OURS}
        switch = Switch(variants, order, arguments.num_steps)
        fit(arguments, len(order) * arguments.num_steps, folder, [switch, times])
    return {
        "ours": medians_by_turn(times.ends, order, arguments.num_steps),
        "ours_processor": medians_by_turn(times.processor, order, arguments.num_steps),
    }


def medians_by_turn(clock_s: list[float], order: list[str], num_steps: int) -> list[dict[str, float]]:
    """Returns for each turn but the first, which warms up, the median step of each variant, by a clock."""
    seconds = np.diff(np.array(clock_s), prepend=np.nan).reshape(len(order), num_steps)
    medians = np.median(seconds[:, NUM_SETTLING_STEPS:], axis=1).tolist()
    size = len(OURS)
    turns = [
        dict(zip(order[at : at + size], medians[at : at + size], strict=True)) for at in range(0, len(order), size)
    ]
    return turns[1:]


def time_peers(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Returns for each turn the seconds of a step in each variant."""
    generator = np.random.default_rng(0)
    turns: list[dict[str, float]] = []
    for _ in range(arguments.num_peer_turns):
        turns.append({})
        for index in generator.permutation(len(PEERS)):
            times = StepTimes()
            with tempfile.TemporaryDirectory() as folder:
                fit(arguments, 40, folder, [times], peer(PEERS[index], folder))
            turns[-1][PEERS[index]] = float(np.median(np.diff(times.ends)[NUM_SETTLING_STEPS:]))
    return turns


def time_host(arguments: argparse.Namespace, num_steps: int, num_sharded_layers: int = 0) -> dict[str, float]:
    """Returns the seconds of a step, and its processor seconds in each of our parts."""
    spent_s: defaultdict[str, float] = defaultdict(float)

    def time_method(owner: Any, name: str, label: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent_s[label] += time.thread_time() - started

        patches.enter_context(patch.object(owner, name, timed))

    times = StepTimes()
    with ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        callbacks = our_callbacks("all three callbacks", folder)
        for callback in callbacks:
            for name in HOOKS:
                time_method(callback, name, type(callback).__name__)
        time_method(ObservedAllReduce, "reduce", "DDP's hook")
        for owner, name in (
            *((collectives._GroupHooks, name) for name in ("_before", "_after")),
            *((owner, "end") for owner in (_IssuedBucket, IssuedCollective)),
        ):
            time_method(owner, name, "process groups' hooks")
        fit(arguments, num_steps, folder, [*callbacks, times], num_sharded_layers=num_sharded_layers)
    step_s = float(np.median(np.diff(times.ends)[NUM_SETTLING_STEPS:]))
    return {"a step": step_s, **{label: seconds / num_steps for label, seconds in spent_s.items()}}


def run_rank(arguments: argparse.Namespace) -> None:
    """Runs all blocks on this rank; rank 0 prints the seconds as JSON."""
    rank = int(os.environ["RANK"])
    if arguments.share_gpu:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": "0"}
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    result = {
        **time_ours(arguments),
        "peers": time_peers(arguments),
        "host_s": time_host(arguments, arguments.num_host_steps),
    }
    if arguments.num_sharded_layers:
        result["sharded_host_s"] = time_host(arguments, arguments.num_host_steps // 5, arguments.num_sharded_layers)
    if rank == 0:
        print_result(result)


def summary(turns: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Returns for each variant the seconds of a step, and what they are more than the baseline's."""
    rows = {}
    for variant in turns[0] if turns else ():
        added = [turn[variant] - turn[BASELINE] for turn in turns]
        shares = [turn[variant] / turn[BASELINE] - 1 for turn in turns]
        rows[variant] = {
            "step_s": float(np.median([turn[variant] for turn in turns])),
            "added_s": median_with_interval(added),
            "added_share": median_with_interval(shares),
        }
    return rows


def print_table(rows: dict[str, dict[str, Any]], title: str) -> None:
    """Prints one row a variant."""
    table = Table(title=title)
    for heading in ("measuring with", "step, ms", "added, us", "95 %", "added, %", "95 %"):
        table.add_column(heading, justify="left" if heading == "measuring with" else "right", no_wrap=True)
    for variant, row in sorted(rows.items(), key=lambda item: item[1]["step_s"]):
        cells = [variant, f"{1e3 * row['step_s']:.2f}"]
        for key, factor, digits in (("added_s", 1e6, 0), ("added_share", 100, 2)):
            median, low, high = (factor * row[key][part] for part in ("median", "low_95", "high_95"))
            cells += [f"{median:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
        table.add_row(*cells)
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Runs all blocks, prints a table for each part and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=int, default=40, help="blocks of each variant of ours")
    parser.add_argument("--num-peer-turns", type=int, default=10, help="fits with each other profiler")
    parser.add_argument("--num-host-steps", type=int, default=400, help="whose processor time is added up")
    parser.add_argument("--num-sharded-layers", type=int, default=31, help="of a GPT under FSDP2; 0 for none")
    parser.add_argument("--num-steps", type=int, default=24, help=f"in a block; the first {NUM_SETTLING_STEPS} settle")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=12, help="sequences in a batch of one rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, as hosts of their own")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(arguments)
        return
    load = os.getloadavg()[0]
    result = run_command(torchrun(arguments.num_ranks, __file__, "--worker", *sys.argv[1:]))
    rows = {part: summary(result[part]) for part in ("ours", "ours_processor", "peers")}
    for part, of_part in rows.items():
        print_table(of_part, f"{part}: added to each step")
    for part in ("host_s", "sharded_host_s"):
        spent_us = {label: round(1e6 * seconds) for label, seconds in result.get(part, {}).items()}
        print(f"{part}: processor time, us a step:", spent_us)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments), "summary": rows, **result}, load)


if __name__ == "__main__":
    main()
