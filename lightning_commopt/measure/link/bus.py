"""The factor between the two bandwidths that nccl-tests prints: algorithm and bus bandwidth."""

from __future__ import annotations


def bus_factor(operation: str, num_ranks: int) -> float:
    """Returns the factor from algorithm to bus bandwidth, which is comparable with a link's rate.

    Source: nccl-tests, doc/PERFORMANCE.md. Compound reductions and comm hooks, which it does not cover, count as the
    all-reduce that they replace.
    """
    if operation in ("all_reduce", "reduce_broadcast", "reduce_scatter_all_gather", "comm_hook"):
        return 2 * (num_ranks - 1) / num_ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0
