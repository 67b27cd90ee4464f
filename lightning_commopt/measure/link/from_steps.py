"""Measures a link from a training run without any probe: the times of its buckets as a bench result."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.message_times import MIN_TIMES, NUM_LAST_STEPS, MessageTimes, bucket_times


def result_of_run(run_dir: Path, *, num_last_steps: int = NUM_LAST_STEPS) -> BenchResult:
    """Returns the times of a run's buckets by size, under the load of its backward; see `MessageTimes`.

    Ranks append to their files while they train: read them again for newer steps.

    Args:
        run_dir: the directory that has ``comm_time``, where `CommTimeMonitor` saved steps.
        num_last_steps: to use, of those that all ranks have saved.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: the steps have no buckets, or too few.
    """
    ranks = read_run(run_dir)
    header, world_size = ranks[0].header, ranks[0].world_size
    times = MessageTimes(num_last_steps)
    by_rank = [{record.step: record for record in records.steps} for records in ranks]
    common = sorted(set.intersection(*map(set, by_rank))) if len(ranks) == world_size else []
    for step in common[-num_last_steps:]:
        messages = [bucket_times(steps[step]) for steps in by_rank]
        sizes_bytes = [message.size_bytes for message in messages[0]]
        if all([message.size_bytes for message in own] == sizes_bytes for own in messages):
            times.add(min(pair, key=attrgetter("time_s")) for pair in zip(*messages, strict=True))
    where = where_of_run(run_dir, header, last_step=common[-1] if common else -1)
    result = times.result(comm_hook=str(header.get("comm_hook", "none")), where=where)
    if not result.rows:
        raise ValueError(f"{run_dir}: no bucket of its steps was recorded {MIN_TIMES} times on all ranks")
    return result


def where_of_run(run_dir: Path, header: Mapping[str, Any], *, last_step: int) -> dict[str, Any]:
    """Returns ``where`` of a result: name and header of its run, and the last step that counts."""
    return {
        "run": Path(run_dir).name,
        "world_size": header["world_size"],
        "backend": header.get("backend"),
        "comm_hook": header.get("comm_hook"),
        "last_step": last_step,
    }
