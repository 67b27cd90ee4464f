"""Our bus bandwidth of all_reduce beside that of ml-engineering's all_reduce_bench.py, on the same link, in turns.

That program is not ours and not here: fetch network/benchmarks/all_reduce_bench.py of github.com/stas00/ml-engineering.
It is for CUDA. Each of its ranks runs it as it is, in a process in which the few names of torch.cuda that it needs mean
the CPU, and NCCL means gloo. It prints two decimals of GB/s: its clock runs a thousand times too slowly here, so that
these are MB/s. It times one call behind a barrier and takes the mean over ranks; we time many, on the slowest rank.

python benchmarks/beside_ml_engineering.py --script all_reduce_bench.py --output benchmarks/results/...
"""

import argparse
import os
import re
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results_file import write_result

from commopt_diagnose.bench.settings import BenchSettings
from commopt_diagnose.bench.start import start_bench
from lightning_commopt.launch.lab import NetLab

_ROW = re.compile(r"\|\s*([\d.]+)([KMG])iB \|\s*([\d.]+)GBps \|\s*([\d.]+)GBps \|")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Event:
    """Stands for a CUDA event."""

    def __init__(self, **_: Any) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        """Notes the time."""
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Returns what their program takes for milliseconds: a thousandth of them."""
        return end.at_s - self.at_s


def run_theirs(script: str, size_bytes: int) -> None:
    """Runs their program as this rank, on the CPU."""
    torch.set_num_threads(1)
    rand, init = torch.rand, dist.init_process_group
    torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.rand = lambda *size, device=None, **options: rand(*size, **options)
    dist.init_process_group = lambda backend, **_: init("gloo")
    os.chdir(tempfile.mkdtemp())  # it may leave a picture
    gib = str(size_bytes / 2**30)
    one_call = "--with-host-overhead"  # of the versions that time several calls at once, on devices only
    options = [one_call] if one_call in Path(script).read_text(encoding="utf-8") else []
    sys.argv = [script, "--payload_size_in_gib", gib, "--num_iterations", "10", *options]
    runpy.run_path(script, run_name="__main__")
    time.sleep(0.05)


def theirs(arguments: argparse.Namespace, size_bytes: int) -> float:
    """Returns the bus bandwidth that their program prints, in bytes a second."""
    command = [sys.executable, __file__, "--script", str(arguments.script), "--worker", str(size_bytes)]
    with NetLab(arguments.num_hosts, arguments.rate) as lab:
        output = lab.run(command, pin_to_cores=True, timeout_s=600)[0]
    found = _ROW.search(output)
    if found is None or float(found[1]) * _UNITS[found[2]] != size_bytes:
        sys.exit(f"no result for {size_bytes} in what it printed:\n{output}")
    return float(found[3]) * 1e6


def ours(arguments: argparse.Namespace, size_bytes: int) -> float:
    """Returns the bus bandwidth that a bench of ours measures."""
    settings = BenchSettings(sizes_bytes=[size_bytes])
    return start_bench(settings, link=arguments.rate, num_hosts=arguments.num_hosts).rows[0].busbw


def main() -> None:
    """Takes turns, prints a line for each size, and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--num-hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--sizes-bytes", type=int, nargs="+", default=[2**18, 2**20, 2**22, 2**24, 2**26])
    parser.add_argument("--num-turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_theirs(str(arguments.script), arguments.worker)
        return
    load, sizes = os.getloadavg()[0], {}
    for size_bytes in arguments.sizes_bytes:
        turns = [(ours(arguments, size_bytes), theirs(arguments, size_bytes)) for _ in range(arguments.num_turns)]
        ratio = statistics.median(a / b for a, b in turns)
        sizes[size_bytes] = {"ours_and_theirs": turns, "ratio": ratio}
        medians = [statistics.median(each) / 1e6 for each in zip(*turns, strict=True)]
        print(f"{size_bytes} bytes: ours {medians[0]:.1f}, theirs {medians[1]:.1f} MB/s, ratio {ratio:.3f}", flush=True)
    if arguments.output is not None:
        settings = {"num_hosts": arguments.num_hosts, "rate": arguments.rate}
        write_result(arguments.output, {"settings": settings, "sizes": sizes}, load)


if __name__ == "__main__":
    main()
