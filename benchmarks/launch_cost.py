"""What a bucket of each compressor costs the host of a GPU, and how many kernels it launches: no GPU is needed.

Host time: the compressor's own code and Triton's real launch path for sm_90, down to the call of the driver, which does
nothing. Collectives are left out. Tensors are small ones on CPU, so operations of torch take about what their dispatch
takes. Launches and bytes: from the simulated device (tests/streams), for a bucket of 25 MiB and 8 ranks.

    PYTHONPATH=tests python benchmarks/launch_cost.py

What it leaves out: the driver's call, 2 to 4 us a launch, and the stream and events that the hook adds to a bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from results_file import write_result
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from lightning_commopt.compressors import (
    AllReduce,
    AlternatingPowerSGD,
    Cast,
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Int4,
    Int8,
    Layout,
    PowerSGD,
)
from lightning_commopt.compressors.channel import Channel, Pending
from lightning_commopt.compressors.kernels import dispatch
from support.ddp_steps import Training
from support.fake_cuda import cuda_on
from support.machine import Machine

NUM_RANKS = 8
SHAPES = [(1024, 4096), (4096,), (2304, 1024), (1024,)]  # 25 MiB in float32
SMALL_SHAPES = [(24, 16), (16,), (16, 24), (24,)]
_BF16 = Cast(dtype=torch.bfloat16)
COMPRESSORS: dict[str, Compressor] = {
    "all_reduce": AllReduce(),
    "bf16": _BF16,
    "bf16 with feedback": ErrorFeedback(inner=_BF16),
    "bf16, float32 sum": Cast(dtype=torch.bfloat16, accumulate="float32"),
    "int8": Int8(),
    "int4": Int4(),
    "powersgd, rank 4": PowerSGD(matrix_rank=4, min_compression_rate=0.1),
    "alternating, rank 4": AlternatingPowerSGD(matrix_rank=4, min_compression_rate=0.1),
    "hierarchical int8, 8 nodes of 8": Hierarchical(inner=Int8()),
}


@contextmanager
def stubbed_launcher() -> Iterator[None]:
    """Makes kernels compile for sm_90 and launch as there, but for the driver's call."""

    def get_ready(kernel: Any) -> None:
        kernel._run = lambda *args: None

    device = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -1,
        get_current_stream=lambda device: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(cast(Any, device))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", get_ready))
        stack.enter_context(mock.patch.object(dispatch, "form_for", _in_triton))
        stack.enter_context(torch.no_grad())
        yield


def _in_triton(*args: Any) -> str:
    return "triton"


class _NoCollectives:
    """Replaces a channel: what is received is there already, and holds anything."""

    def __init__(self, size: int, within: _NoCollectives | None = None, across: _NoCollectives | None = None) -> None:
        self.size, self.rank, self.within, self.across = size, 0, within, across
        self._gathered: dict[int, Tensor] = {}

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Pending(tensor, [])

    all_to_all = all_reduce

    def reduce_scatter(self, message: Tensor) -> Pending:
        return Pending(message[0], [])

    def all_gather(self, part: Tensor) -> Pending:
        if part.numel() not in self._gathered:
            self._gathered[part.numel()] = part.repeat(self.size, 1)
        return Pending(self._gathered[part.numel()], [])


def host_us(compressor: Compressor, num_repeats: int) -> tuple[float, int]:
    """Returns the microseconds of a bucket without collectives, the shortest of all repeats, and Triton's launches."""
    layout = Layout.of([torch.empty(shape) for shape in SMALL_SHAPES], torch.float32)
    channel = cast(Channel, _NoCollectives(NUM_RANKS, _NoCollectives(NUM_RANKS), _NoCollectives(NUM_RANKS)))
    flat = torch.ones(layout.numel)
    state = compressor.init(layout, flat.device, 5)

    def one_step() -> float:
        rounds, seconds = compressor.rounds(flat, layout, state, channel), 0.0
        arrived = None
        with contextlib.suppress(StopIteration):
            while True:
                start = time.perf_counter()
                pending = None
                try:
                    pending = next(rounds) if arrived is None else rounds.send(arrived)
                finally:
                    seconds += time.perf_counter() - start
                arrived = pending.wait()
        return seconds

    for _ in range(4):
        one_step()
    shortest_s = min(one_step() for _ in range(num_repeats))
    launched: list[str] = []
    with mock.patch.object(CompiledKernel, "launch_metadata", _noted(launched)):
        one_step()
        one_step()  # some alternate
    return 1e6 * shortest_s, len(launched) // 2


def _noted(launched: list[str]) -> Callable[..., None]:
    return lambda kernel, *args: launched.append(kernel.name)


def launches(compressor: Compressor) -> tuple[int, float]:
    """Returns the kernels of a bucket of 25 MiB, as the mean of two steps, and the bytes that they move an element."""
    machine = Machine()
    with warnings.catch_warnings(), cuda_on(machine, NUM_RANKS):
        warnings.simplefilter("ignore")
        training = Training(machine, compressor, shapes=SHAPES, buckets=[range(len(SHAPES))], num_streams=1)
        training.run(2)
        before = len(machine.launches)
        for _ in range(2):
            training.sync(0).wait()
        kernels = [launch for launch in machine.launches[before:] if not launch.stream.startswith("nccl")]
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    return len(kernels) // 2, sum(launch.num_bytes for launch in kernels) / 2 / numel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressors", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS))
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--output", type=Path, help="where to store the result")
    arguments = parser.parse_args()
    load, rows = os.getloadavg()[0], []
    torch.set_num_threads(1)
    table = Table("compressor", "host us", "Triton's launches", "all launches", "bytes per element")
    for name in arguments.compressors:
        num_launches, bytes_per_element = launches(COMPRESSORS[name])
        with stubbed_launcher():
            microseconds, num_triton = host_us(COMPRESSORS[name], arguments.repeats)
        rows.append(
            {
                "compressor": name,
                "host_us": microseconds,
                "num_triton_launches": num_triton,
                "num_launches": num_launches,
                "bytes_per_element": bytes_per_element,
            }
        )
        table.add_row(name, f"{microseconds:.0f}", str(num_triton), str(num_launches), f"{bytes_per_element:.1f}")
    Console(width=110).print(table)
    if arguments.output is not None:
        write_result(arguments.output, {"triton_for": "sm_90, launcher stubbed", "rows": rows}, load)


if __name__ == "__main__":
    main()
