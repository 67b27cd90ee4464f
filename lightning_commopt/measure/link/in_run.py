"""LinkTracker: keeps the link model of a running fit up to date with its last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_commopt.measure.link.bench_result import bus_factor
from lightning_commopt.measure.link.from_steps import where_of_run
from lightning_commopt.measure.link.message_times import BucketTime, MessageTimes, bucket_times, spread_sizes
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.record import StepRecord

NUM_MESSAGES = 8
"""Buckets of a step that count, at most: enough sizes for a curve, and a fit takes about a millisecond
(``benchmarks/link_refresh.py``)."""

_SIZES_RATIO = 2
"""Least ratio of the largest to the smallest message that separates latency from bandwidth: the relative error of the
bandwidth is then at most sqrt(1 + 2**2) / (2 - 1) = 2.2 times that of a time, and grows without limit towards 1."""


class _SentStep(NamedTuple):
    number: int
    sizes_bytes: tuple[int, ...]


class LinkTracker:
    """Keeps the link model of a run up to date.

    Each rank calls `rows` with its steps; the caller gathers the numbers from all ranks and passes them to `update`.
    One rank alone cannot separate the link's time from waiting for others, so without their times there is no model.

    Args:
        run_dir: of the run; the model has its name.
        header: of the rank's file of steps, with "world_size".

    Attributes:
        model: of the last 200 steps; None until a size was measured three times.
    """

    def __init__(self, run_dir: Path, header: Mapping[str, Any]) -> None:
        self.model: LinkModel | None = None
        self._run_dir = run_dir
        self._header = header
        self._comm_hook: str | None = None
        self._sent: list[_SentStep] = []
        self._times = MessageTimes()

    def rows(self, records: Sequence[StepRecord], comm_hook: str) -> list[list[float]]:
        """Returns how long the buckets of some steps took, to be gathered from all ranks.

        Args:
            records: the steps, which replace those of the last call.
            comm_hook: name of what averages the gradients now. A change since the last call discards all earlier times
                and these steps, which may mix both.

        Returns:
            `NUM_MESSAGES` seconds for each step, padded with NaN.
        """
        is_changed = self._comm_hook not in (None, comm_hook)
        self._comm_hook = comm_hook
        if is_changed:
            self._times.clear()
            self.model = None
        self._sent, rows = [], []
        for record in records:
            messages = [] if is_changed else spread_sizes(bucket_times(record), NUM_MESSAGES)
            self._sent.append(_SentStep(record.step, tuple(message.size_bytes for message in messages)))
            rows.append([message.time_s for message in messages] + [math.nan] * (NUM_MESSAGES - len(messages)))
        return rows

    def update(self, times_s: NDArray[np.float64]) -> LinkModel | None:
        """Refreshes the model and returns it; None if these times are not enough for one.

        Args:
            times_s: ``(num_ranks, num_steps, NUM_MESSAGES)``, of all ranks, for the first steps of the last `rows`.
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
        """The two numbers of `link_metrics`; NaN without a model."""
        return link_metrics(self.model)


def link_metrics(model: LinkModel | None) -> dict[str, float]:
    """Returns the two numbers of a run's link model.

    ``link_latency_s`` is that of the model's first segment, ``link_bandwidth`` the bus bandwidth of its last in bytes
    per second. With a comm hook bytes are those before compression, and times include it. Both are NaN if the sizes of
    messages differ too little to separate them.
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
