"""Steps of ranks whose buckets take turns on a link of known latency and bandwidth."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord

LATENCY_S = 2e-3
S_PER_BYTE = 1e-8


def buckets_of_ranks(
    step: int, sizes_bytes: Sequence[int], num_ranks: int = 2, latency_s: float = LATENCY_S, gap_s: float = 0.0
) -> list[tuple[BucketSpan, ...]]:
    """Returns the buckets of a step on each rank, with times on the rank's own clock.

    A bucket is ready at another time on each rank, and sometimes while the one before is on the wire; at least
    ``gap_s`` later than that. It travels once the last rank has it and the link is free, and ends on all ranks at once.
    """
    drawn = random.Random(step)
    ready_s, free_s = [drawn.random() for _ in range(num_ranks)], 0.0
    spans: list[list[BucketSpan]] = [[] for _ in range(num_ranks)]
    for index, size in enumerate(sizes_bytes):
        ready_s = [at_s + gap_s + drawn.random() * 2e-2 for at_s in ready_s]
        begin_s = max(*ready_s, free_s)
        free_s = begin_s + latency_s + size * S_PER_BYTE
        for rank, start_s in enumerate(ready_s):
            origin_s = 100.0 * rank + step
            times_s = {"ready_s": origin_s + start_s, "start_s": origin_s + start_s, "end_s": origin_s + free_s}
            wire = ((times_s["start_s"], times_s["end_s"]),)
            span = BucketSpan(index=index, backward=0, gradient_bytes=size, wire_bytes=size, wire=wire, **times_s)
            spans[rank].append(span)
    return [tuple(of_rank) for of_rank in spans]


def records_of_ranks(
    num_steps: int, sizes_bytes: Sequence[int], num_ranks: int = 2, latency_s: float = LATENCY_S, gap_s: float = 0.0
) -> list[list[StepRecord]]:
    """Returns the steps of each rank; see `buckets_of_ranks`."""
    steps = [buckets_of_ranks(step, sizes_bytes, num_ranks, latency_s, gap_s) for step in range(num_steps)]
    return [
        [
            StepRecord(step=step, num_samples=1, phases=(Phase("backward", 0, 2),), buckets=buckets[rank])
            for step, buckets in enumerate(steps)
        ]
        for rank in range(num_ranks)
    ]
