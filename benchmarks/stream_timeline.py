"""How long backward and gradient sync would take on a GPU that is not there: a simulation, no measurement.

The hook runs on simulated streams (tests/streams), which gives every kernel and collective of a step and what each of
them waits for. A kernel takes the bytes that it reads and writes over the memory's rate, a collective the bytes on the
link over the link's rate, backward what its arithmetic takes. The device runs one kernel at a time, those of the side
streams first if they have priority, else in turn with backward; the link carries one collective at a time.

    PYTHONPATH=tests python benchmarks/stream_timeline.py

What it leaves out: multiprocessors that NCCL takes from others, kernels that do not reach the memory's rate, launches
that come late. So it is good for comparing designs with each other, not for a promise in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results_file import write_result
from rich.console import Console
from rich.table import Table

from lightning_commopt.compressors import AllReduce, Cast, Compressor, Int4, Int8, PowerSGD
from support.ddp_steps import Training
from support.fake_cuda import cuda_on
from support.machine import MAIN, Launch, Machine

MEMORY_BYTES_PER_S = 0.8 * 3.35e12
FLOP_PER_S = 0.4 * 989e12
SHORTEST_KERNEL_S = 4e-6
NUM_RANKS = 8
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the GPUs.

    Attributes:
        bytes_per_s: of one GPU in each direction, as collectives reach it.
        latency_s: of a collective.
    """

    bytes_per_s: float
    latency_s: float


LINKS = {
    "NVLink": Link(bytes_per_s=0.8 * 450e9, latency_s=15e-6),
    "PCIe 5": Link(bytes_per_s=0.6 * 63e9, latency_s=20e-6),
    "100 Gbit/s": Link(bytes_per_s=0.9 * 12.5e9, latency_s=60e-6),
    "25 Gbit/s": Link(bytes_per_s=0.9 * 3.125e9, latency_s=60e-6),
}
COMPRESSORS: dict[str, Compressor] = {
    "all_reduce": AllReduce(),
    "bf16": Cast(dtype=torch.bfloat16),
    "int8": Int8(),
    "int4": Int4(),
    "powersgd, rank 4": PowerSGD(matrix_rank=4),
}
DESIGNS = {"one stream": (1, False), "two streams": (2, False), "two streams, priority": (2, True)}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and what a step of it computes.

    Attributes:
        shapes: of its parameters, in the order of forward.
        backward_s: of one rank.
        batch: of one rank, in words.
    """

    shapes: tuple[tuple[int, ...], ...]
    backward_s: float
    batch: str


def vit_l_32() -> Workload:
    """ViT-L/32: 30.8 GFLOP an image in forward, twice that in backward."""
    layer = [(1024,), (1024,), (3072, 1024), (3072,), (1024, 1024), (1024,), (1024,), (1024,)]
    layer += [(4096, 1024), (4096,), (1024, 4096), (1024,)]
    ends = [(1, 1, 1024), (1024, 3, 32, 32), (1024,), (1, 50, 1024)], [(1024,), (1024,), (1000, 1024), (1000,)]
    shapes = (*ends[0], *layer * 24, *ends[1])
    return Workload(shapes=shapes, backward_s=2 * 30.8e9 * 64 / FLOP_PER_S, batch="64 images")


def gpt_1_3b() -> Workload:
    """A GPT of 24 layers and width 2048: 2 FLOP for each parameter and token in forward, twice that in backward."""
    width = 2048
    layer = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = ((50257, width), (2048, width), *layer * 24, (width,), (width,))
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes)
    return Workload(shapes=shapes, backward_s=4 * num_parameters * 8192 / FLOP_PER_S, batch="8192 tokens")


WORKLOADS = {"ViT-L/32": vit_l_32, "GPT 1.3 B": gpt_1_3b}


def buckets_of(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Returns DDP's default buckets: from the last parameter on, the first one small."""
    buckets: list[list[int]] = [[]]
    size, cap = 0, FIRST_BUCKET_BYTES
    for number in reversed(range(len(shapes))):
        buckets[-1].append(number)
        size += 4 * torch.Size(shapes[number]).numel()
        if size >= cap:
            buckets.append([])
            size, cap = 0, BUCKET_BYTES
    return [bucket for bucket in buckets if bucket]


class _Traced(Training):
    """Computes nothing but the mark of each bucket's part of backward, and has no optimizer."""

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            futures = [self._bucket_ready(index) for index in range(len(self.buckets))]
            for future in futures:
                future.wait()

    def _bucket_ready(self, index: int) -> Any:
        self._machine.launch(f"backward {index}", [], [])
        return self.sync(index)


def trace(workload: Workload, compressor: Compressor, num_streams: int) -> tuple[list[Launch], list[float]]:
    """Returns all launches of a step, and the part of backward that each bucket takes."""
    machine, buckets = Machine(), buckets_of(workload.shapes)
    with warnings.catch_warnings(), cuda_on(machine, NUM_RANKS):
        warnings.simplefilter("ignore")
        training = _Traced(machine, compressor, False, workload.shapes, buckets, num_streams)
        training.run(2)
        before = len(machine.launches)
        training.run(1)
    numels = [sum(torch.Size(workload.shapes[number]).numel() for number in bucket) for bucket in buckets]
    return machine.launches[before:], [numel / sum(numels) for numel in numels]


def simulated_s(
    launches: Sequence[Launch], shares: Sequence[float], workload: Workload, link: Link, has_priority: bool
) -> float:
    """Returns the seconds from the begin of backward to the end of the last launch."""
    first = {stream: min(x.after[stream] for x in launches if x.stream == stream) for stream in _streams(launches)}
    queues: dict[str, list[Launch]] = {stream: [] for stream in first}
    for launch in launches:
        queues[launch.stream].append(launch)
    done = {stream: number - 1 for stream, number in first.items()}
    left_s = {stream: _duration_s(queue[0], shares, workload, link) for stream, queue in queues.items()}
    now_s = 0.0
    while any(queues.values()):
        ready = [
            stream
            for stream, queue in queues.items()
            if queue and all(done.get(x, n) >= n for x, n in queue[0].after.items() if x != stream)
        ]
        rates = _rates(ready, has_priority)
        step_s = min(left_s[stream] / rate for stream, rate in rates.items())
        now_s += step_s
        for stream, rate in rates.items():
            left_s[stream] -= step_s * rate
            if left_s[stream] <= 1e-12:
                done[stream] = queues[stream].pop(0).after[stream]
                if queues[stream]:
                    left_s[stream] = _duration_s(queues[stream][0], shares, workload, link)
    return now_s


def _streams(launches: Sequence[Launch]) -> list[str]:
    return list(dict.fromkeys(launch.stream for launch in launches))


def _rates(ready: Sequence[str], has_priority: bool) -> dict[str, float]:
    """Returns which streams go on, and at which part of their full rate."""
    links = [stream for stream in ready if stream.startswith("nccl")][:1]
    kernels = [stream for stream in ready if not stream.startswith("nccl")]
    beside = [stream for stream in kernels if stream != MAIN]
    running = beside if has_priority and beside else kernels
    return dict.fromkeys(links, 1.0) | dict.fromkeys(running, 1 / max(1, len(running)))


def _duration_s(launch: Launch, shares: Sequence[float], workload: Workload, link: Link) -> float:
    if launch.name.startswith("backward"):
        return shares[int(launch.name.split()[1])] * workload.backward_s
    if not launch.stream.startswith("nccl"):
        return max(SHORTEST_KERNEL_S, launch.num_bytes / MEMORY_BYTES_PER_S)
    # An all-reduce has one tensor, read and written, and moves it twice; the others the larger of two, once.
    moved_bytes = launch.num_bytes if launch.name == "all_reduce" else _larger_bytes(launch)
    return link.latency_s + moved_bytes * (NUM_RANKS - 1) / NUM_RANKS / link.bytes_per_s


def _larger_bytes(launch: Launch) -> float:
    is_gather = launch.name == "all_gather_into_tensor"
    return launch.num_bytes * NUM_RANKS / (NUM_RANKS + 1) if is_gather else launch.num_bytes / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--output", type=Path, help="where to store the result")
    arguments = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    for model in arguments.workloads:
        workload = WORKLOADS[model]()
        for name, compressor in COMPRESSORS.items():
            traces = {num_streams: trace(workload, compressor, num_streams) for num_streams in (1, 2)}
            for link_name, link in LINKS.items():
                exposed_ms = {
                    design: 1e3 * (simulated_s(*traces[num], workload, link, has_priority) - workload.backward_s)
                    for design, (num, has_priority) in DESIGNS.items()
                }
                rows.append({"model": model, "link": link_name, "comm_hook": name, "exposed_ms": exposed_ms})
        backward_ms = 1e3 * workload.backward_s
        table = Table("link", "comm_hook", *DESIGNS, title=f"SIMULATED: {model}, {workload.batch}, ms after backward")
        for row in rows:
            if row["model"] == model:
                table.add_row(row["link"], row["comm_hook"], *(f"{ms:.1f}" for ms in row["exposed_ms"].values()))
        Console(width=110).print(table, f"backward alone: {backward_ms:.1f} ms, {len(workload.shapes)} parameters")
    if arguments.output is not None:
        assumed = {
            "memory_bytes_per_s": MEMORY_BYTES_PER_S,
            "flop_per_s": FLOP_PER_S,
            "shortest_kernel_s": SHORTEST_KERNEL_S,
            "num_ranks": NUM_RANKS,
            "links": {name: vars(link) for name, link in LINKS.items()},
        }
        write_result(arguments.output, {"is_simulated": True, "assumed": assumed, "rows": rows}, load)


if __name__ == "__main__":
    main()
