"""What `commopt bench` adds to torch's collectives: its timed blocks against a loop written by hand.

Two ranks on this machine. A turn is three blocks of 4 ms, at least one call each: the bench's own (`block`, with its
call before the clock starts), the loop by hand, and the loop once more, on the same memory, in each of the six orders
by turns. A block's time is that of the slower rank. What counts is the ratio of two blocks of the same turn: a drift of
the machine is in both. The median over thousands of turns has an interval by order statistics, and the ratio of the
loop to itself beside it says how far to trust the method. The bench's blocks usually last 0.1 s: what they add once a
block weighs 25 times as much here. What a call costs besides the collective is measured too, with a function in the
collective's place that returns at once.

It takes --seconds for each of five sizes and half a minute to start, under five minutes in all.

python benchmarks/bench_overhead.py --output benchmarks/results/bench_overhead_HARDWARE_DATE.json
"""

import argparse
import gc
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from results_file import write_result
from scipy.stats import binom

from commopt_diagnose.bench.measure import _Bench
from commopt_diagnose.bench.operations import prepare, ranks_by_scope, views
from commopt_diagnose.bench.result import Case
from commopt_diagnose.bench.settings import BenchSettings
from lightning_commopt.testing.ranks import run_ranks

SIZES_BYTES = (8, 2**12, 2**16, 2**20, 2**23)
BENCH, LOOP, AGAIN = range(3)
ORDERS = tuple(itertools.permutations((BENCH, LOOP, AGAIN)))
BLOCK_S = 4e-3
NUM_TRIALS = 40


def bench_of(size_bytes: int, num_iters: int) -> tuple[_Bench, Case, torch.Tensor]:
    """Returns a bench that makes so many calls in a block, a case for it, and the memory that the case works on."""
    settings = BenchSettings(sizes_bytes=[size_bytes], num_iters=num_iters)
    device = torch.device("cpu")
    memory = [torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    case = Case(
        operation="all_reduce", size_bytes=size_bytes, count=size_bytes // 4, dtype="float32", redop="sum",
        place="in", num_ranks=2,
    )  # fmt: skip
    tensor, _ = views(memory, torch.float32, size_bytes // 4)
    return _Bench(settings, device, 2, *ranks_by_scope(2), memory), case, tensor


def by_hand(tensor: torch.Tensor, num_iters: int) -> float:
    """Returns the seconds of a call in a plain loop."""
    dist.all_reduce(tensor)
    dist.all_reduce(torch.zeros(1))
    start = time.perf_counter()
    for _ in range(num_iters):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / num_iters


def compare(size_bytes: int, seconds: float) -> tuple[int, NDArray[np.float64]]:
    """Returns the calls in a block, and the seconds of a call on the slower rank.

    Args:
        size_bytes: of the message.
        seconds: that it is to take, about.

    Returns:
        The seconds as ``(num_turns, 3)``: the bench's block, the loop by hand, and the loop again.
    """
    call_s = np.median([by_hand(torch.ones(size_bytes // 4), 1) for _ in range(NUM_TRIALS)])
    counts = torch.tensor([max(1.0, BLOCK_S / call_s), 0.0]).round().long()
    dist.broadcast(counts, 0)  # one rank decides
    num_iters = int(counts[0])
    bench, case, tensor = bench_of(size_bytes, num_iters)
    entry = bench.begin(case)
    block_s = np.median([_lasting(tensor, num_iters) for _ in range(NUM_TRIALS)])
    counts[1] = max(6, round(seconds / 3 / block_s))
    dist.broadcast(counts, 0)
    turns = torch.zeros(int(counts[1]), 3, dtype=torch.float64)
    gc.disable()
    for turn, order in zip(turns, itertools.cycle(ORDERS), strict=False):
        for which in order:
            turn[which] = bench.block(entry) if which == BENCH else by_hand(tensor, num_iters)
    dist.all_reduce(turns, dist.ReduceOp.MAX)
    return num_iters, turns.numpy()


def _lasting(tensor: torch.Tensor, num_iters: int) -> float:
    """Returns the seconds of a whole block by hand, with what comes before the clock starts."""
    start = time.perf_counter()
    by_hand(tensor, num_iters)
    return time.perf_counter() - start


def besides_s() -> tuple[float, float]:
    """Returns the seconds of a call in our block and in a loop by hand, but for the collective."""
    collective, num_iters = dist.all_reduce, 200_000
    bench, case, tensor = bench_of(8, 1)
    dist.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    try:
        call = prepare(case, bench.scopes["all"], bench.memory, root=0)
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


def ratio_of(numerators: NDArray[np.float64], denominators: NDArray[np.float64]) -> dict[str, float]:
    """Returns the median ratio within a turn, and its 95 % interval by order statistics."""
    ratios = np.sort(numerators / denominators)
    low = int(binom.ppf(0.025, len(ratios), 0.5)) - 1
    return {
        "median": float(np.median(ratios)),
        "low_95": float(ratios[max(0, low)]),
        "high_95": float(ratios[min(len(ratios) - 1, len(ratios) - 1 - low)]),
    }


def main() -> None:
    """Compares all sizes, prints a line for each, and stores the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=48, help="for each size")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    ours_s, theirs_s = run_ranks(besides_s)[0]
    print(f"besides the collective a call takes {1e9 * ours_s:.0f} ns, in a loop by hand {1e9 * theirs_s:.0f} ns")
    sizes: dict[int, Any] = {}
    for size_bytes in SIZES_BYTES:
        num_iters, turns = run_ranks(compare, size_bytes, arguments.seconds, limit_s=20 * arguments.seconds + 60)[0]
        call_s = float(np.median(turns[:, LOOP]))
        sizes[size_bytes] = {
            "bench_over_loop": ratio_of(turns[:, BENCH], turns[:, LOOP]),
            "loop_over_itself": ratio_of(turns[:, AGAIN], turns[:, LOOP]),
            "added_share": (ours_s - theirs_s) / call_s,
            "call_s": {str(q): np.quantile(turns, q / 100, axis=0).tolist() for q in (5, 25, 50, 75, 95)},
            "num_calls_in_block": num_iters,
            "num_turns": len(turns),
        }
        said = [
            f"{label} {ratio['median']:.4f} ({ratio['low_95']:.4f} to {ratio['high_95']:.4f})"
            for label, ratio in (
                ("bench / loop", sizes[size_bytes]["bench_over_loop"]),
                ("loop / itself", sizes[size_bytes]["loop_over_itself"]),
            )
        ]
        added = f"{100 * sizes[size_bytes]['added_share']:.2f} % of the {1e6 * call_s:.1f} us of a call"
        print(f"{size_bytes} bytes, {len(turns)} turns of {num_iters}: {'; '.join(said)}; added {added}", flush=True)
    if arguments.output is not None:
        besides = {"bench": ours_s, "loop": theirs_s}
        result = {"load_at_end": os.getloadavg()[0], "besides_s": besides, "sizes": sizes}
        write_result(arguments.output, result, load)


if __name__ == "__main__":
    main()
