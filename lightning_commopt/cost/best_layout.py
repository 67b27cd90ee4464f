"""The contiguous layout of buckets with the least time, by dynamic programming over ready times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from lightning_commopt.compressors import Compressor
from lightning_commopt.cost.link import Link
from lightning_commopt.cost.predict import Costs, jobs_of
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.plan import CommPlan

MAX_GROUPS = 96


def best_layout(
    workload: Workload,
    link: Link,
    costs: Costs,
    compressor: Compressor | None = None,
    *,
    num_ranks: int | None = None,
    max_groups: int = MAX_GROUPS,
) -> tuple[int, ...]:
    """Returns how many gradients each bucket has in the layout whose gradient sync ends first.

    Buckets are sent in order, one at a time: a bucket begins when its last gradient is ready and the one before has
    ended. Then the earliest end of the first ``j`` gradients is all that matters to those that follow, so dynamic
    programming is exact. Of layouts that end at the same time the one with the fewest buckets is taken.

    More gradients than ``max_groups`` are taken together first, into neighbours of about the same size; then it is
    exact for these groups.

    Source: Shi et al., "MG-WFBP", IEEE INFOCOM 2019; Zhang et al., "DeAR", IEEE ICDCS 2023.
    """
    num_ranks = workload.num_ranks if num_ranks is None else num_ranks
    plan = CommPlan(comm_hook=compressor)
    groups = _groups(workload.gradients, max_groups)
    starts = [0, *accumulate(groups)]
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # end, number of buckets, start of the last one
    for stop in range(1, len(starts)):
        options = []
        for start in range(stop):
            bucket = workload.gradients[starts[start] : starts[stop]]
            end_s = max(best[start][0], bucket[-1].ready_s) + _bucket_s(plan, bucket, link, costs, num_ranks, workload)
            options.append((end_s, best[start][1] + 1, start))
        best.append(min(options))
    sizes, stop = [], len(groups)
    while stop:
        start = best[stop][2]
        sizes.append(starts[stop] - starts[start])
        stop = start
    return tuple(reversed(sizes))


def _bucket_s(
    plan: CommPlan, bucket: Sequence[Gradient], link: Link, costs: Costs, num_ranks: int, workload: Workload
) -> float:
    jobs = jobs_of(plan, [bucket], link, costs, num_ranks, workload.device)
    return sum(phase.duration_s for job in jobs for phase in job.phases)


def _groups(gradients: Sequence[Gradient], max_groups: int) -> list[int]:
    """Returns how many neighbours form each group."""
    least_bytes = sum(gradient.num_bytes for gradient in gradients) / max_groups
    if len(gradients) <= max_groups:
        least_bytes = 0
    groups, size, num_bytes = [], 0, 0
    for gradient in gradients:
        size, num_bytes = size + 1, num_bytes + gradient.num_bytes
        if num_bytes >= least_bytes:
            groups.append(size)
            size = num_bytes = 0
    return [*groups, size] if size else groups


def layout_end_s(
    sizes: Sequence[int],
    workload: Workload,
    link: Link,
    costs: Costs,
    compressor: Compressor | None = None,
    *,
    num_ranks: int | None = None,
) -> float:
    """Returns when the gradient sync of a layout ends, as `best_layout` counts it."""
    num_ranks = workload.num_ranks if num_ranks is None else num_ranks
    end_s, start, plan = -math.inf, 0, CommPlan(comm_hook=compressor)
    for size in sizes:
        bucket = workload.gradients[start : start + size]
        end_s = max(end_s, bucket[-1].ready_s) + _bucket_s(plan, bucket, link, costs, num_ranks, workload)
        start += size
    return end_s
