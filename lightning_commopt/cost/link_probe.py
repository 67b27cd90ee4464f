"""A short probe of the link: a few collectives on an idle link, from small ones to the largest uncompressed message.

A compressed run sends a fraction of its gradients' bytes, so its own messages do not show how long those would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_commopt.cost.shared_core import message_cpu_s
from lightning_commopt.measure.clock import clock_for
from lightning_commopt.measure.link.link import Link, num_wakes

_FIRST_BYTES = 2**12
"""Size of the first message, which shows the latency alone: 4 KiB take 33 µs at 1 Gbit/s."""

_GROWTH = 16
"""Ratio of each size to the next smaller one. Four sizes up to 16 MiB suffice for a line, in a fraction of a second."""

_NUM_SMALL, _NUM_LARGE = 7, 3
"""Repetitions of sizes below `_LARGE_BYTES`, and from it on. The least time counts, so more repetitions find a moment
without other work; small messages are disturbed more, and cost less."""

_LARGE_BYTES = 2**20
"""A message is large from here on: 1 MiB takes 8 ms at 1 Gbit/s, beside which a delay of the scheduler is small."""

_MAX_SIZE_S = 1.0
"""Time limit of all repetitions of a size; a size that is expected to take longer is left out. A judgement: nobody
should wait for the probe at the end of a fit, but slow links need a large message."""


Collective = Callable[[torch.Tensor], None]
"""Issues a collective with a float32 message ``(n,)``, and waits for it as its caller in training does."""


class ProbedSize(NamedTuple):
    """A collective of one size, on this rank."""

    num_bytes: int
    time_s: float  # least time of the repetitions
    cpu_s: float  # processor time of this process's other threads; 0 on CUDA


def probe_link(
    group: dist.ProcessGroup, device: torch.device, max_bytes: int, collective: Collective | None = None
) -> list[ProbedSize]:
    """Times collectives of growing size; all ranks of ``group`` must call it, while nothing else is under way.

    Args:
        group: the group of gradient sync, whose ranks all pass the same ``max_bytes``.
        device: the device of the gradients, and so of the messages.
        max_bytes: the largest message, usually the largest bucket.
        collective: what to time; None for an all-reduce.

    Returns:
        The sizes in ascending order, as many on all ranks. The last is below ``max_bytes`` if all repetitions of a
        larger one would take more than a second.
    """

    def all_reduce(message: torch.Tensor) -> None:
        dist.all_reduce(message, group=group)

    collective = collective or all_reduce
    probed: list[ProbedSize] = []
    num_bytes = min(_FIRST_BYTES, max_bytes)
    _time(collective, device, num_bytes)  # connections and buffers are made with the first one
    while True:
        last = _time(collective, device, num_bytes)
        probed.append(last)
        if num_bytes >= max_bytes:
            return probed
        num_bytes = min(_GROWTH * num_bytes, max_bytes)
        slowest_s = torch.tensor(last.time_s, device=device)
        dist.all_reduce(slowest_s, dist.ReduceOp.MAX, group=group)
        if _num_repetitions(num_bytes) * slowest_s.item() * num_bytes / last.num_bytes > _MAX_SIZE_S:
            return probed


def _num_repetitions(num_bytes: int) -> int:
    return _NUM_SMALL if num_bytes < _LARGE_BYTES else _NUM_LARGE


def _time(collective: Collective, device: torch.device, num_bytes: int) -> ProbedSize:
    message, clock = torch.zeros(max(1, num_bytes // 4), device=device), clock_for(device)
    num_repetitions = _num_repetitions(num_bytes)
    cpu_s, marks = _cpu_of_others_s(), [clock.mark()]
    for _ in range(num_repetitions):
        collective(message)
        marks.append(clock.mark())
    clock.wait_for(marks[-1])
    times_s = [clock.seconds(mark) for mark in marks]
    others_s = 0.0 if device.type == "cuda" else (_cpu_of_others_s() - cpu_s) / num_repetitions
    return ProbedSize(message.nbytes, min(end - start for start, end in pairwise(times_s)), others_s)


def _cpu_of_others_s() -> float:
    return time.process_time() - time.thread_time()


def link_of_probe(sizes: Sequence[ProbedSize], num_ranks: int, *, has_trees: bool = False) -> Link:
    """Returns the idle link behind a probe: its latency from the smallest size, its rate from the largest.

    The sizes are from `probe_link`, at least one. The time of a single size counts as latency.
    """
    small, large = sizes[0], sizes[-1]
    num_bytes = max(1, large.num_bytes - small.num_bytes)
    num_hops = 2 * (num_ranks - 1)
    latency_s = min(probed.time_s for probed in sizes)
    slope = max(0.0, large.time_s - latency_s) / num_bytes
    message_s = min(probed.cpu_s for probed in sizes)
    text = f"all-reduces of {small.num_bytes / 1e6:.2g} to {large.num_bytes / 1e6:.3g} MB at the end of the fit"
    return Link(
        hop_s=latency_s / num_hops,
        s_per_byte=slope * num_ranks / num_hops,
        cpu_s_per_byte=max(0.0, large.cpu_s - message_s) / num_bytes,
        cpu_s_per_message=message_cpu_s(message_s, num_wakes("all_reduce", num_ranks)),
        has_trees=has_trees,
        source=text,
    )
