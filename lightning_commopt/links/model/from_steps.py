"""What a training run tells of its link, without any probe: the marks of its buckets, as a bench would have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_commopt.links.bench.result import BenchResult, Case, Row
from lightning_commopt.measure.files import RankRecords, read_run

_MIN_TIMES = 3


def result_of_run(run_dir: Path, *, num_last_steps: int = 200) -> BenchResult:
    """Returns the times of a run's buckets by size, under the load that its backward is.

    A bucket takes from its start, or from the end of the bucket before it if that is later, to its end: DDP starts
    buckets while others are on the wire. The rank that came last to it waits for nobody: the shortest of all ranks'
    times counts. Without a comm hook that is the all-reduce; with one, compression is part of it. Ranks append to
    their files while they train: reading them again refreshes what they tell.

    Args:
        run_dir: the directory that has ``comm_time``, where `CommTimeMonitor` saved steps.
        num_last_steps: that count.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the steps have no buckets, or too few.
    """
    ranks = read_run(run_dir)
    times = _times_by_size(ranks, num_last_steps)
    kept = {size: times_s for size, times_s in sorted(times.items()) if len(times_s) >= _MIN_TIMES}
    if not kept:
        raise ValueError(f"{run_dir}: no bucket of its steps was seen {_MIN_TIMES} times on all ranks")
    header = ranks[0].header
    world_size = ranks[0].world_size
    rows = [
        Row(case=_case(size, str(header.get("comm_hook", "none")), world_size), times_s=times_s, num_iters=1)
        for size, times_s in kept.items()
    ]
    return BenchResult(rows=tuple(rows), where=_where(run_dir, ranks), settings={})


def _where(run_dir: Path, ranks: Sequence[RankRecords]) -> dict[str, Any]:
    header = ranks[0].header
    return {
        "run": Path(run_dir).name,
        "world_size": ranks[0].world_size,
        "num_nodes": header.get("num_nodes"),
        "backend": header.get("backend"),
        "last_step": max(step.step for records in ranks for step in records.steps),
    }


def _times_by_size(ranks: Sequence[RankRecords], num_last_steps: int) -> dict[int, list[float]]:
    by_bucket: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for records in ranks:
        for step in records.steps[-num_last_steps:]:
            last_end_s = -math.inf
            for bucket in sorted(step.buckets, key=lambda bucket: bucket.end_s):
                key = step.step, bucket.backward, bucket.index
                began_s = max(bucket.start_s, last_end_s)
                by_bucket.setdefault(key, []).append((bucket.gradient_bytes, bucket.end_s - began_s))
                last_end_s = bucket.end_s
    times: dict[int, list[float]] = {}
    for seen in by_bucket.values():
        sizes = {size for size, _ in seen}
        shortest_s = min(time_s for _, time_s in seen)
        if len(seen) == ranks[0].world_size and len(sizes) == 1 and shortest_s > 0:
            times.setdefault(sizes.pop(), []).append(shortest_s)
    return times


def _case(size_bytes: int, sync_method: str, num_ranks: int) -> Case:
    has_hook = sync_method not in ("none", "all_reduce")
    return Case(
        operation="comm_hook" if has_hook else "all_reduce",
        comm_hook=sync_method if has_hook else None,
        size_bytes=size_bytes,
        count=max(1, size_bytes // 4),
        dtype="float32",
        redop="mean" if has_hook else "sum",
        place="in",
        load="compute",
        num_ranks=num_ranks,
    )
