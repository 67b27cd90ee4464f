"""What `commopt bench` adds to torch's collectives: its timed blocks against a loop written by hand, in turns.

Two ranks on this machine. In each turn both make as many calls of one size, in the order A B and B A by turns. These
ratios are noise on a busy machine; so what a call costs besides the collective is measured too, with a function in the
collective's place that returns at once.

python benchmarks/bench_overhead.py --output benchmarks/results/bench_overhead_HARDWARE_DATE.json
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results_file import median_with_interval, write_result

from lightning_commopt.links.bench.groups import Memory, ranks_by_scope
from lightning_commopt.links.bench.measure import _Bench, _Entry
from lightning_commopt.links.bench.result import Case
from lightning_commopt.links.bench.settings import BenchSettings
from lightning_commopt.selftest.ranks import run_ranks

SIZES_BYTES = (8, 2**12, 2**16, 2**20, 2**23)


def by_hand(tensor: torch.Tensor, num_iters: int) -> float:
    """Returns the seconds of a call in a plain loop."""
    dist.all_reduce(tensor)
    dist.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    for _ in range(num_iters):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / num_iters


def compare(size_bytes: int, num_turns: int, block_s: float) -> list[tuple[float, float]]:
    """Returns the seconds of a call in our block and in the loop, on the slowest rank, for each turn."""
    settings = BenchSettings(sizes_bytes=[size_bytes], block_s=block_s)
    scopes, channel = ranks_by_scope(2)
    device = torch.device("cpu")
    bench = _Bench(settings, device, 2, scopes, channel, Memory(size_bytes, device))
    case = Case(
        operation="all_reduce", size_bytes=size_bytes, count=size_bytes // 4, dtype="float32", redop="sum",
        place="in", num_ranks=2,
    )  # fmt: skip
    entry: _Entry = bench.begin(case)
    tensor = torch.ones(size_bytes // 4)
    turns = []
    for turn in range(num_turns):
        pair = torch.zeros(2, dtype=torch.float64)
        for which in (0, 1) if turn % 2 else (1, 0):
            pair[which] = by_hand(tensor, entry.num_iters) if which else bench.block(entry)
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        turns.append((pair[0].item(), pair[1].item()))
    return turns


def besides_s() -> tuple[float, float]:
    """Returns the seconds of a call in our block and in a loop by hand, but for the collective."""
    collective, num_iters = dist.all_reduce, 200_000
    scopes, channel = ranks_by_scope(2)
    device = torch.device("cpu")
    bench = _Bench(BenchSettings(sizes_bytes=[8]), device, 2, scopes, channel, Memory(8, device))
    case = Case(
        operation="all_reduce", size_bytes=8, count=2, dtype="float32", redop="sum", place="in", num_ranks=2
    )  # fmt: skip
    call, tensor = bench.begin(case).call, torch.ones(2)
    assert call is not None
    dist.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    try:
        ours = min(bench._time(call, num_iters) for _ in range(7)) / num_iters
        theirs = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(num_iters):
                dist.all_reduce(tensor)
            theirs.append(time.perf_counter() - start)
    finally:
        dist.all_reduce = collective
    return ours, min(theirs) / num_iters


def main() -> None:
    """Compares all sizes, prints a line for each, and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=int, default=40)
    parser.add_argument("--block-s", type=float, default=0.1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ours_s, theirs_s = run_ranks(besides_s)[0]
    print(f"besides the collective a call takes {1e9 * ours_s:.0f} ns, in a loop by hand {1e9 * theirs_s:.0f} ns")
    sizes: dict[int, Any] = {}
    for size_bytes in SIZES_BYTES:
        turns = run_ranks(compare, size_bytes, arguments.num_turns, arguments.block_s)[0]
        ratio = median_with_interval([ours / theirs for ours, theirs in turns])
        sizes[size_bytes] = {"bench_over_loop": ratio, "turns": turns}
        shortest_s = min(theirs for _, theirs in turns)
        sizes[size_bytes]["added_share"] = (ours_s - theirs_s) / shortest_s
        ends = f"{ratio['low_95']:.3f} to {ratio['high_95']:.3f}"
        added = f"{100 * sizes[size_bytes]['added_share']:.2f} % of the shortest call"
        print(f"{size_bytes} bytes: bench / loop {ratio['median']:.3f} ({ends}); added: {added}", flush=True)
    if arguments.output is not None:
        besides = {"bench": ours_s, "loop": theirs_s}
        write_result(arguments.output, {"besides_s": besides, "block_s": arguments.block_s, "sizes": sizes}, load)


if __name__ == "__main__":
    main()
