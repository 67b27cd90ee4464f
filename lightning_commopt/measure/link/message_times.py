"""Times of training steps' messages: of buckets by size, from the records of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from lightning_commopt.measure.link.bench_result import BenchResult, Case, Row
from lightning_commopt.measure.record import StepRecord

NUM_LAST_STEPS = 200
"""Steps that count: enough for medians, few enough to follow changes of the link."""

MIN_TIMES = 3
"""Times that a size needs to count."""


class BucketTime(NamedTuple):
    """A bucket as a message.

    Attributes:
        size_bytes: of its gradients.
        time_s: from its start, or from the end of the bucket before it if that is later, to its end: DDP starts
            buckets while others are on the wire.
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


def spread_sizes(messages: Sequence[BucketTime], num_messages: int) -> list[BucketTime]:
    """Returns at most ``num_messages``, from the smallest to the largest, spread evenly over the order of sizes.

    The choice depends on sizes alone, which all ranks have in the same order.

    >>> [bucket.size_bytes for bucket in spread_sizes([BucketTime(size, 0.1) for size in (5, 9, 3, 7, 1)], 3)]
    [1, 5, 9]
    """
    if len(messages) <= num_messages:
        return list(messages)
    ordered = sorted(range(len(messages)), key=lambda index: (messages[index].size_bytes, index))
    return [messages[ordered[number * (len(ordered) - 1) // (num_messages - 1)]] for number in range(num_messages)]


class MessageTimes:
    """The times of the last ``num_last_steps`` steps' messages by size."""

    def __init__(self, num_last_steps: int = NUM_LAST_STEPS) -> None:
        self._steps: deque[list[BucketTime]] = deque(maxlen=num_last_steps)

    def clear(self) -> None:
        self._steps.clear()

    def add(self, messages: Iterable[BucketTime]) -> None:
        """Adds a step.

        Args:
            messages: each with the shortest of all ranks' times: the last rank to join a collective waits for no other.
                Times that are not above 0, or NaN, do not count.
        """
        self._steps.append([message for message in messages if message.time_s > 0])

    def result(self, *, comm_hook: str, where: Mapping[str, Any]) -> BenchResult:
        """Returns a row for each size that was measured `MIN_TIMES` times, under the load "compute" of backward.

        Without a comm hook the times are those of the all-reduce; with one, compression is part of them.

        Args:
            comm_hook: the name of what averages the gradients, "none" for DDP's own all-reduce.
            where: of the result; its "world_size" is the number of ranks.
        """
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
        times: defaultdict[int, list[float]] = defaultdict(list)
        for step in self._steps:
            for size_bytes, time_s in step:
                times[size_bytes].append(time_s)
        rows = [
            Row(case=replace(case, size_bytes=size_bytes, count=max(1, size_bytes // 4)), times_s=times_s, num_iters=1)
            for size_bytes, times_s in sorted(times.items())
            if len(times_s) >= MIN_TIMES
        ]
        return BenchResult(rows=tuple(rows), where=where, settings={})
