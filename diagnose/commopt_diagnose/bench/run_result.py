"""The buckets of a training run as a `BenchResult`: what its steps took, without any probe."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path

from commopt_diagnose.bench.result import BenchResult, Case, Row
from lightning_commopt.measure.files import read_run, steps_of_plan
from lightning_commopt.measure.link.from_steps import MIN_TIMES, NUM_LAST_STEPS
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import grouped


def result_of_run(run_dir: Path) -> BenchResult:
    """Returns the times of a run's buckets by size, in the last steps that all ranks have saved.

    A size has a row, under the load "compute" of backward, if it was measured `MIN_TIMES` times. Each bucket has the
    shortest of all ranks' times, as the last rank to join a collective waits for no other. Times that are not above 0,
    or NaN, do not count. Without a comm hook ("none") they are times of the all-reduce; with one, compression is part
    of them. Ranks append to their files while they train: read them again for newer steps.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the steps have no buckets, or too few.
    """
    ranks = read_run(run_dir)
    common = steps_of_plan(ranks) if len(ranks) == ranks[0].world_size else {}
    times = []
    for records in list(common.values())[-NUM_LAST_STEPS:]:
        of_ranks = list(map(_bucket_times, records))
        sizes_bytes = [size_bytes for size_bytes, _ in of_ranks[0]]
        if all([size_bytes for size_bytes, _ in own] == sizes_bytes for own in of_ranks):
            times += [min(rank_times, key=itemgetter(1)) for rank_times in zip(*of_ranks, strict=True)]
    header = ranks[0].header
    comm_hook = header.get("comm_hook") or "none"
    has_hook = comm_hook not in ("none", "all_reduce")
    case = Case(
        operation="comm_hook" if has_hook else "all_reduce",
        comm_hook=comm_hook if has_hook else None,
        size_bytes=0,
        count=0,
        dtype="float32",
        redop="mean" if has_hook else "sum",
        place="in",
        load="compute",
        num_ranks=header["world_size"],
    )
    rows = [
        Row(case=replace(case, size_bytes=size_bytes, count=max(1, size_bytes // 4)), times_s=times_s, num_iters=1)
        for size_bytes, times_s in sorted(grouped(pair for pair in times if pair[1] > 0).items())
        if len(times_s) >= MIN_TIMES
    ]
    if not rows:
        raise ValueError(f"{run_dir}: no bucket of its steps was recorded {MIN_TIMES} times on all ranks")
    where = {name: header.get(name) for name in ("world_size", "backend", "comm_hook")}
    where |= {"run": run_dir.name, "last_step": max(common, default=-1)}
    return BenchResult(rows=tuple(rows), where=where, settings={})


def _bucket_times(record: StepRecord) -> list[tuple[int, float]]:
    """Returns size and time of each bucket of a step on one rank, in the same order on all ranks.

    The time is from its start, or from the end of the bucket before it if that is later, to its end: DDP starts buckets
    while others are on the wire. Empty if two buckets share a number, as in a static graph's first backward: their
    order may differ between ranks.
    """
    times: dict[tuple[int, int], tuple[int, float]] = {}
    last_end_s = -math.inf
    for bucket in sorted(record.buckets, key=attrgetter("end_s")):
        time_s = bucket.end_s - max(bucket.start_s, last_end_s)
        times[bucket.backward, bucket.index] = bucket.gradient_bytes, time_s
        last_end_s = bucket.end_s
    return [times[key] for key in sorted(times)] if len(times) == len(record.buckets) else []
