"""What CommTimeMonitor measures against what torch.profiler sees of the same steps.

Trains with both at once. Total: time in which a collective was under way. From the profiler's trace: the union of
NCCL's kernels (CUDA) or of gloo's all-reduces (CPU), whose spans begin when one of its threads takes them up. Exposed:
the part of NCCL's kernels that no other kernel covers; on CPU, for each step, from the call of its last all-reduce to
the end of all of them. With ``--strategy fsdp2`` on CPU, where each all-gather and reduce-scatter blocks its rank: from
the calls of all of them to their ends; on CUDA only the total is compared.

python benchmarks/comm_time_against_profiler.py --device cuda --output benchmarks/results/...
torchrun's ranks on one GPU need --share-gpu: each pretends to be a host of its own.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from rank_results import print_result, run_command, torchrun
from results_file import settings_of, write_result
from rich.console import Console
from rich.table import Table
from small_gpt import train_gpt

from lightning_commopt import CommOptDDP, CommOptModelParallel
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.record import StepRecord, covered_s

NUM_WARMUP_STEPS = 10
Interval = tuple[float, float]


class ProfiledSteps(Callback):
    """Profiles the steps after the warm-up.

    Args:
        path: of the trace, written at the end of the fit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Starts with the first step after the warm-up."""
        if trainer.global_step == NUM_WARMUP_STEPS:
            self._synchronize(trainer)
            self._profiler.start()

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        """Stops, and writes the trace."""
        self._synchronize(trainer)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))

    @staticmethod
    def _synchronize(trainer: Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains on this rank; rank 0 prints both pictures of the same steps as JSON."""
    rank = int(os.environ["RANK"])
    if arguments.share_gpu:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "LOCAL_RANK": "0"}
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    is_sharded = arguments.strategy == "fsdp2"
    strategy: Any
    if is_sharded:
        strategy = CommOptModelParallel(int(os.environ["WORLD_SIZE"]), 1)
    else:
        strategy = CommOptDDP(bucket_cap_mb=arguments.bucket_cap_mb, comm_hook=arguments.comm_hook)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        comm_time = CommTimeMonitor(dirpath=folder, print_summary=False)
        train_gpt(
            num_steps=NUM_WARMUP_STEPS + arguments.num_steps,
            batch_size=arguments.batch_size,
            width=arguments.width,
            accelerator=arguments.device,
            devices=1 if arguments.share_gpu else int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=int(os.environ["WORLD_SIZE"]) if arguments.share_gpu else 1,
            strategy=strategy,
            callbacks=[ProfiledSteps(trace), comm_time],
        )
        records = read_run(folder)[0].steps[NUM_WARMUP_STEPS:]
        events = json.loads(trace.read_text())["traceEvents"]
    if rank == 0:
        if is_sharded and arguments.device == "cuda":
            ours, profiled = of_unit_spans(records), from_trace(events, "cuda", 0)
        elif is_sharded:
            ours, profiled = of_units(records), of_blocking_calls(events)
        else:
            ours = {
                "total_s": sum(record.totals.wire_s for record in records),
                "exposed_s": sum(record.totals.exposed_s for record in records),
            }
            profiled = from_trace(events, arguments.device, len(records[-1].buckets))
        print_result({"ours": ours, "profiler": profiled, "num_steps": len(records)})


def from_trace(events: list[dict[str, Any]], device: str, num_buckets: int) -> dict[str, float]:
    """Returns the seconds in which collectives were under way, and those that were exposed.

    Args:
        events: of a Chrome trace.
        device: "cpu" or "cuda".
        num_buckets: of a step.
    """
    if device == "cuda":
        kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        nccl = [interval(event) for event in kernels if "nccl" in event["name"].lower()]
        others = [interval(event) for event in kernels if "nccl" not in event["name"].lower()]
        both = covered_s([*nccl, *others])
        return {"total_s": covered_s(nccl), "exposed_s": both - covered_s(others)}
    spans = [interval(event) for event in events if event.get("name") == "gloo:all_reduce"]
    calls_s = sorted(interval(event)[0] for event in events if event.get("name") == "c10d::allreduce_")
    ends_s = sorted(end_s for _, end_s in spans)
    assert len(calls_s) == len(ends_s), "a call for each all-reduce"
    last = slice(num_buckets - 1, None, num_buckets)
    exposed_s = sum(end_s - call_s for call_s, end_s in zip(calls_s[last], ends_s[last], strict=True))
    return {"total_s": covered_s(spans), "exposed_s": exposed_s}


UNITS = {"all_gather": ("c10d::_allgather_base_", "gloo:all_gather")}
UNITS["reduce_scatter"] = ("c10d::_reduce_scatter_base_", "gloo:all_reduce")  # of which gloo makes it
"""Operations of FSDP2: what calls them in a trace, and what they are there on gloo's threads."""


def of_units(records: list[StepRecord]) -> dict[str, float]:
    """Returns the seconds in FSDP2's collectives as `CommTimeMonitor` has them, of each operation and of both."""
    seconds = dict.fromkeys(UNITS, 0.0)
    for one in (one for record in records for one in record.collectives if one.operation in UNITS and not one.source):
        assert one.start_s is not None
        assert one.end_s is not None
        seconds[one.operation] += one.end_s - one.start_s
    return {"total_s": sum(seconds.values()), "exposed_s": sum(seconds.values()), **seconds}


def of_unit_spans(records: list[StepRecord]) -> dict[str, float]:
    """Returns the seconds in which some collective of FSDP2 was under way; those of each step follow one another."""
    of_fsdp = [one for record in records for one in record.collectives if one.operation in UNITS and not one.source]
    spans = [(one.start_s, one.end_s) for one in of_fsdp]
    known = [(start_s, end_s) for start_s, end_s in spans if start_s is not None and end_s is not None]
    if len(known) < len(spans) or not spans:
        raise ValueError(f"CommTimeMonitor has the times of {len(known)} of {len(spans)} collectives of FSDP2")
    return {"total_s": covered_s(known)}


def of_blocking_calls(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the same from a trace; each call lasts until the first span of its kind that begins later has ended."""
    seconds = {}
    for operation, (call, span) in UNITS.items():
        calls_s = sorted(interval(event)[0] for event in events if event.get("name") == call)
        spans = sorted(interval(event) for event in events if event.get("name") == span)
        seconds[operation] = sum(
            next(end_s for start_s, end_s in spans if start_s >= call_s) - call_s for call_s in calls_s
        )
    return {"total_s": sum(seconds.values()), "exposed_s": sum(seconds.values()), **seconds}


def interval(event: dict[str, Any]) -> Interval:
    """Returns begin and end of an event in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def print_table(turns: list[dict[str, Any]]) -> None:
    """Prints one row a turn."""
    table = Table(title="ms a step")
    for heading in ("turn", "total, ours", "profiler", "ratio", "exposed, ours", "profiler", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, turn in enumerate(turns):
        cells = []
        for key in ("total_s", "exposed_s"):
            ours, profiled = (1e3 * turn[whose].get(key, 0) / turn["num_steps"] for whose in ("ours", "profiler"))
            cells += [f"{ours:.3f}", *([f"{profiled:.3f}", f"{ours / profiled:.3f}"] if profiled else ["-", "-"])]
        table.add_row(str(number), *cells)
    Console(width=max(100, Console().width)).print(table)


def main() -> None:
    """Runs all turns, prints a table and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=int, default=5)
    parser.add_argument("--num-steps", type=int, default=30, help="profiled steps of a turn")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch of one rank")
    parser.add_argument("--bucket-cap-mb", type=float, default=1.0)
    parser.add_argument("--comm-hook", default="none")
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0, as hosts of their own")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_rank(arguments)
        return
    load = os.getloadavg()[0]
    command = torchrun(arguments.num_ranks, __file__, "--worker", *sys.argv[1:])
    turns = [run_command(command) for _ in range(arguments.num_turns)]
    print_table(turns)
    if arguments.output:
        write_result(arguments.output, {"settings": settings_of(arguments), "turns": turns}, load)


if __name__ == "__main__":
    main()
