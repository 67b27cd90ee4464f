"""Steps of two ranks whose hosts' clocks differ, as a recorder would make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord

STEP_S = 0.1
MB = 2**20


def layout(num_buckets: int = 3, names_each: int = 2) -> dict[int, BucketInfo]:
    return {
        index: BucketInfo(
            index=index,
            gradient_bytes=(index + 1) * MB,
            names=tuple(f"layer{index}.{name}" for name in range(names_each)),
            is_last=index == num_buckets - 1,
        )
        for index in range(num_buckets)
    }


def step_record(step: int, since_s: float = 0.0, num_buckets: int = 3, num_rounds: int = 2) -> StepRecord:
    """A step whose buckets are ready one after another, and wait for each other: the last two overlap on their way."""
    began = since_s + step * STEP_S
    ends = [began + at for at in (0.0, 0.01, 0.03, 0.08, 0.09, STEP_S)]
    phases = zip(("data", "forward", "backward", "optimizer", "other"), ends[:-1], ends[1:], strict=True)
    buckets = []
    for index in range(num_buckets):
        ready_s = began + 0.03 + 0.006 * (index + 1)
        start_s = began + 0.04 + 0.01 * index
        end_s = start_s + (0.015 if index == num_buckets - 2 else 0.01)
        each_s = (end_s - start_s) / (num_rounds or 1)
        wire = tuple((start_s + each_s * r + 1e-4, start_s + each_s * (r + 1) - 1e-4) for r in range(num_rounds))
        buckets.append(
            BucketSpan(
                index=index,
                backward=0,
                gradient_bytes=(index + 1) * MB,
                wire_bytes=MB,
                ready_s=ready_s,
                start_s=start_s,
                end_s=end_s,
                wire=wire,
            )
        )
    return StepRecord(
        step=step,
        num_samples=32,
        phases=tuple(Phase(*phase) for phase in phases),
        buckets=tuple(buckets),
        layout=layout(num_buckets),
    )


def header(rank: int = 0, world_size: int = 2, origin_unix_s: float = 1.7e9, **more: Any) -> dict[str, Any]:
    plain = {"rank": rank, "world_size": world_size, "origin_unix_s": origin_unix_s, "device": "cpu", "backend": "gloo"}
    return {**plain, **more}


def write_run(run_dir: Path, num_steps: int = 5, world_size: int = 2) -> list[list[StepRecord]]:
    """Writes a run. Rank r's clock began r seconds later, and its host's clock is r hours ahead."""
    ranks = []
    for rank in range(world_size):
        records = [step_record(step, since_s=50.0 - rank) for step in range(num_steps)]
        first_line = header(rank, world_size, origin_unix_s=1.7e9 + rank * 3601)
        StepWriter(rank_file(run_dir, rank), first_line).write(records)
        ranks.append(records)
    return ranks
