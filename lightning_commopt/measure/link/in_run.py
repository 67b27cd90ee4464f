"""LinkTracker: the link model of a run that trains, refreshed from the steps that just ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_commopt.measure.link.bench_result import bus_factor
from lightning_commopt.measure.link.from_steps import where_of_run
from lightning_commopt.measure.link.message_times import BucketTime, MessageTimes, bucket_times, of_most_sizes
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.record import StepRecord

NUM_MESSAGES = 8
"""Buckets of a step that count, at most: enough sizes for a curve, and a fit takes about a millisecond
(``benchmarks/link_refresh.py``)."""

_SIZES_RATIO = 2
"""Between the largest and the smallest message, at least, to tell latency from bandwidth: the relative error of the
bandwidth is then at most sqrt(1 + 2**2) / (2 - 1) = 2.2 times that of a time, and grows without limit towards 1."""


class _Step(NamedTuple):
    """A step of this rank, whose times the other ranks have as well."""

    number: int
    sizes_bytes: tuple[int, ...]


class LinkTracker:
    """Keeps the link model of a run up to date.

    Each rank calls `rows` with its steps and hands the numbers to the others with whatever else the ranks gather;
    `update` takes those of all ranks. It needs no communication of its own. Alone a rank cannot tell what the link
    takes from what it waits for the others: without their times there is no model.

    Args:
        run_dir: of the run, whose name the model bears.
        header: what a rank's file of steps says of the run; it has "world_size".

    Attributes:
        model: of the last 200 steps; None until a size was seen three times.
    """

    def __init__(self, run_dir: Path, header: Mapping[str, Any]) -> None:
        self.model: LinkModel | None = None
        self._run_dir = run_dir
        self._header = header
        self._comm_hook: str | None = None
        self._sent: list[_Step] = []
        self._times = MessageTimes()

    def rows(self, records: Sequence[StepRecord], comm_hook: str) -> list[list[float]]:
        """Returns how long the buckets of some steps took, for all ranks to know.

        Args:
            records: the steps, which replace those of the call before.
            comm_hook: what averages the gradients now. Where it changed since the last call, all times before that
                count no more, and neither do these steps, which may be of both.

        Returns:
            `NUM_MESSAGES` numbers for each step, in seconds; NaN where it has fewer buckets.
        """
        is_changed = self._comm_hook not in (None, comm_hook)
        self._comm_hook = comm_hook
        if is_changed:
            self._times.clear()
            self.model = None
        self._sent, rows = [], []
        for record in records:
            messages = [] if is_changed else of_most_sizes(bucket_times(record), NUM_MESSAGES)
            self._sent.append(_Step(record.step, tuple(message.size_bytes for message in messages)))
            rows.append([message.time_s for message in messages] + [math.nan] * (NUM_MESSAGES - len(messages)))
        return rows

    def update(self, times_s: NDArray[np.float64]) -> LinkModel | None:
        """Refreshes the model.

        Args:
            times_s: ``(num_ranks, num_steps, NUM_MESSAGES)``, what `rows` gave on each rank for the first steps of its
                last call.

        Returns:
            The new model; None where these times make none.
        """
        world_size = self._header["world_size"]
        if len(times_s) < world_size or not times_s.shape[1]:
            return None
        for step, shortest_s in zip(self._sent, times_s.min(axis=0).tolist(), strict=False):
            self._times.add(map(BucketTime, step.sizes_bytes, shortest_s))
        last_step = self._sent[times_s.shape[1] - 1].number
        comm_hook = str(self._comm_hook)
        where = where_of_run(self._run_dir, {**self._header, "comm_hook": comm_hook}, last_step=last_step)
        result = self._times.result(comm_hook=comm_hook, where=where)
        if not result.rows:
            return None
        self.model = LinkModel.fit(result)
        return self.model

    @property
    def metrics(self) -> dict[str, float]:
        """The model in two numbers, see `link_metrics`; both NaN while there is none."""
        return link_metrics(self.model)


def link_metrics(model: LinkModel | None) -> dict[str, float]:
    """Returns the two numbers of a run's link model.

    Returns:
        ``link_latency_s`` of a small message, and ``link_bandwidth``, the bus bandwidth of a large one in bytes a
        second: of the first and the last segment of the model. With a comm hook bytes are those before compression,
        and times include it. NaN where the sizes of messages do not differ enough to tell the two apart.
    """
    latency_s = bandwidth = math.nan
    if model is not None:
        (curve,) = model.curves
        first, last = curve.segments[0], curve.segments[-1]
        if last.last_bytes >= _SIZES_RATIO * first.first_bytes:
            latency_s = first.latency_s
            if last.s_per_byte > 0:
                bandwidth = bus_factor(curve.case.operation, curve.case.num_ranks) / last.s_per_byte
    return {"link_latency_s": latency_s, "link_bandwidth": bandwidth}
