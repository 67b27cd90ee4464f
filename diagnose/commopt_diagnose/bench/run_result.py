"""The buckets of a training run as a `BenchResult`: what its steps took, without any probe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from commopt_diagnose.bench.result import BenchResult, Case, Row
from lightning_commopt.measure.files import read_run, steps_of_plan
from lightning_commopt.measure.link.from_steps import MIN_TIMES, NUM_LAST_STEPS
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import grouped


class BucketTime(NamedTuple):
    """A bucket as a message.

    Its time is from its start, or from the end of the bucket before it if that is later, to its end: DDP starts buckets
    while others are on the wire.
    """

    size_bytes: int
    time_s: float


def bucket_times(record: StepRecord) -> list[BucketTime]:
    """Returns the messages of a step on one rank, in the same order on all ranks.

    Empty if two buckets share a number, as in a static graph's first backward: their order may differ between ranks.
    """
    times: dict[tuple[int, int], BucketTime] = {}
    last_end_s = -math.inf
    for bucket in sorted(record.buckets, key=attrgetter("end_s")):
        time_s = bucket.end_s - max(bucket.start_s, last_end_s)
        times[bucket.backward, bucket.index] = BucketTime(bucket.gradient_bytes, time_s)
        last_end_s = bucket.end_s
    return [times[key] for key in sorted(times)] if len(times) == len(record.buckets) else []


def result_of_steps(steps: Iterable[Iterable[BucketTime]], where: Mapping[str, Any]) -> BenchResult:
    """Returns a row for each size that was measured `MIN_TIMES` times, under the load "compute" of backward.

    Each message has the shortest of all ranks' times, as the last rank to join a collective waits for no other. Times
    that are not above 0, or NaN, do not count. Without a comm hook ("none") they are times of the all-reduce; with one,
    compression is part of them. For ``where`` see `where_of_run`.
    """
    comm_hook = where["comm_hook"] or "none"
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
        num_ranks=where["world_size"],
    )
    times = grouped(message for step in steps for message in step if message.time_s > 0)
    rows = [
        Row(case=replace(case, size_bytes=size_bytes, count=max(1, size_bytes // 4)), times_s=times_s, num_iters=1)
        for size_bytes, times_s in sorted(times.items())
        if len(times_s) >= MIN_TIMES
    ]
    return BenchResult(rows=tuple(rows), where=where, settings={})


def result_of_run(run_dir: Path) -> BenchResult:
    """Returns the times of a run's buckets by size, in the last steps that all ranks have saved.

    Ranks append to their files while they train: read them again for newer steps.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the steps have no buckets, or too few.
    """
    ranks = read_run(run_dir)
    common = steps_of_plan(ranks) if len(ranks) == ranks[0].world_size else {}
    steps = []
    for records in list(common.values())[-NUM_LAST_STEPS:]:
        messages = list(map(bucket_times, records))
        sizes_bytes = [message.size_bytes for message in messages[0]]
        if all([message.size_bytes for message in own] == sizes_bytes for own in messages):
            steps.append([min(same, key=attrgetter("time_s")) for same in zip(*messages, strict=True)])
    result = result_of_steps(steps, where_of_run(run_dir, ranks[0].header, last_step=max(common, default=-1)))
    if not result.rows:
        raise ValueError(f"{run_dir}: no bucket of its steps was recorded {MIN_TIMES} times on all ranks")
    return result


def where_of_run(run_dir: Path, header: Mapping[str, Any], *, last_step: int) -> dict[str, Any]:
    """Returns ``where`` of a result: name and header of its run, and the last step that counts."""
    known = {name: header.get(name) for name in ("backend", "comm_hook")}
    return {"run": run_dir.name, "world_size": header["world_size"], **known, "last_step": last_step}
