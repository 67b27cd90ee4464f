"""Measures a link from training steps without any probe: from the files of a run, or while it trains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_commopt.measure.files import common_steps, read_run
from lightning_commopt.measure.link.bench_result import BenchResult, Case, Row, bus_factor
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import byte_unit, grouped

NUM_LAST_STEPS = 200  # the model is fitted to these: enough for medians, few enough to follow changes of the link
MIN_TIMES = 3  # a message size counts once it has this many times

# Most buckets of a step that count: enough sizes for a curve, and few enough to fit it in about a millisecond
# (``benchmarks/link_refresh.py``).
NUM_MESSAGES = 8

# The largest message must be this many times the smallest to separate latency from bandwidth. With a ratio of 2 the
# relative error of the bandwidth is at most sqrt(1 + 2**2) / (2 - 1) = 2.2 times the error of a time; it grows without
# limit as the ratio approaches 1.
_SIZES_RATIO = 2


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
    common = common_steps(ranks) if len(ranks) == ranks[0].world_size else {}
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


class LinkTracker:
    """Keeps ``model``, fitted to the last 200 steps, up to date; None until a size was measured three times.

    Each rank calls `rows` with its steps; the caller gathers the numbers from all ranks and passes them to `update`.
    One rank alone cannot separate the link's time from waiting for others, so without their times there is no model.
    """

    def __init__(self, run_dir: Path, header: Mapping[str, Any]) -> None:
        self.model: LinkModel | None = None
        self._run_dir = run_dir
        self._header = header
        self._comm_hook: str | None = None
        self._sent: list[tuple[int, list[int]]] = []  # the number of a step, and the sizes of its messages
        self._steps: deque[list[BucketTime]] = deque(maxlen=NUM_LAST_STEPS)

    def rows(self, records: Sequence[StepRecord], comm_hook: str) -> list[list[float]]:
        """Returns how long the buckets of some steps took, to be gathered from all ranks.

        The steps replace the steps of the last call. If ``comm_hook``, the name of what averages the gradients now, has
        changed, all earlier times are discarded, and these steps too, as some of them may still have used the old one.

        Returns:
            `NUM_MESSAGES` seconds for each step, padded with NaN.
        """
        is_changed = self._comm_hook not in (None, comm_hook)
        self._comm_hook = comm_hook
        if is_changed:
            self._steps.clear()
            self.model = None
        self._sent, rows = [], []
        for record in records:
            messages = [] if is_changed else spread_sizes(bucket_times(record), NUM_MESSAGES)
            self._sent.append((record.step, [message.size_bytes for message in messages]))
            rows.append([message.time_s for message in messages] + [math.nan] * (NUM_MESSAGES - len(messages)))
        return rows

    def update(self, times_s: NDArray[np.float64]) -> LinkModel | None:
        """Refreshes the model and returns it; None if these times are not enough for one.

        They have the shape ``(num_ranks, num_steps, NUM_MESSAGES)`` and belong to the first steps of the last `rows`.
        """
        world_size = self._header["world_size"]
        if len(times_s) < world_size or not times_s.shape[1]:
            return None
        for (_, sizes_bytes), shortest_s in zip(self._sent, times_s.min(axis=0).tolist(), strict=False):
            self._steps.append(list(map(BucketTime, sizes_bytes, shortest_s)))
        last_step, _ = self._sent[times_s.shape[1] - 1]
        header = {**self._header, "comm_hook": str(self._comm_hook)}
        result = result_of_steps(self._steps, where_of_run(self._run_dir, header, last_step=last_step))
        if not result.rows:
            return None
        self.model = LinkModel.fit(result)
        return self.model

    @property
    def metrics(self) -> dict[str, float]:
        """The two numbers of the model.

        ``link_latency_s`` is the latency of the model's first segment, ``link_bandwidth`` the bus bandwidth of its last
        segment in bytes per second. With a comm hook bytes are counted before compression, and times include it. Both
        are NaN without a model, and if the sizes of messages differ too little to separate them.
        """
        latency_s = bandwidth = math.nan
        if self.model is not None:
            (curve,) = self.model.curves
            first, last = curve.segments[0], curve.segments[-1]
            if last.last_bytes >= _SIZES_RATIO * first.first_bytes:
                latency_s = first.latency_s
                if last.s_per_byte > 0:
                    bandwidth = bus_factor(curve.case.operation, curve.case.num_ranks) / last.s_per_byte
        return {"link_latency_s": latency_s, "link_bandwidth": bandwidth}

    @property
    def why_unknown(self) -> str:
        """Why there is a model but no number of `metrics`, in a sentence; else empty."""
        if self.model is None or not math.isnan(self.metrics["link_bandwidth"]):
            return ""
        (curve,) = self.model.curves
        first_bytes, last_bytes = curve.segments[0].first_bytes, curve.segments[-1].last_bytes
        if last_bytes >= _SIZES_RATIO * first_bytes:
            return "link_bandwidth is unknown, as large buckets took no longer than small ones."
        unit = byte_unit(last_bytes)
        sizes = "the same size" if first_bytes == last_bytes else f"{unit.text(first_bytes)} to {unit.text(last_bytes)}"
        return (
            f"link_latency_s and link_bandwidth are unknown, as the buckets have {sizes}: the largest must be twice as"
            " large as the smallest to separate the two."
        )
