"""LinkTracker: fits the link to the last steps of a running fit, from the times of all ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from numpy import float64
from numpy.typing import NDArray

from lightning_commopt.measure.link.from_steps import (
    NUM_LAST_STEPS,
    NUM_TIMES,
    SIZES_RATIO,
    LinkFit,
    SentStep,
    fit_link,
    sent_step,
)
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.text.formatting import byte_unit


class LinkTracker:
    """Keeps ``fit``, the `LinkFit` of the last steps, up to date. It is None until a size was measured often enough.

    Each rank calls `rows` with its steps; the caller gathers the numbers from all ranks and passes them to `update`.
    One rank alone cannot separate the link's time from waiting for others, so without their times there is no fit.
    """

    def __init__(self, num_ranks: int, *, has_trees: bool = False) -> None:
        self.fit: LinkFit | None = None
        self.steps: deque[SentStep] = deque(maxlen=NUM_LAST_STEPS)  # times are the least of all ranks
        self._num_ranks = num_ranks
        self._has_trees = has_trees
        self._comm_hook: str | None = None
        self._own: list[SentStep] = []  # the steps of the last `rows`

    def rows(self, records: Sequence[StepRecord], comm_hook: str) -> list[list[float]]:
        """Returns how long the messages of some steps took, to be gathered from all ranks.

        The steps replace the steps of the last call. If ``comm_hook``, the name of what averages the gradients now, has
        changed, all earlier times are discarded, and these steps too, as some of them may still have used the old one.

        Returns:
            `NUM_TIMES` seconds for each step, padded with NaN.
        """
        is_changed = self._comm_hook not in (None, comm_hook)
        self._comm_hook = comm_hook
        self._own = [sent_step(record, self._num_ranks) for record in records]
        if is_changed:
            self.steps.clear()
            self.fit = None
            self._own = [step.with_times([math.nan] * NUM_TIMES) for step in self._own]
        return [step.times_s for step in self._own]

    def update(self, times_s: NDArray[float64]) -> None:
        """Updates ``fit``, if these times are sufficient.

        They have the shape ``(num_ranks, num_steps, NUM_TIMES)`` and belong to the first steps of the last `rows`.
        """
        if len(times_s) < self._num_ranks or not times_s.shape[1]:
            return
        least_s = times_s.min(axis=0).tolist()
        self.steps.extend(step.with_times(own_s) for step, own_s in zip(self._own, least_s, strict=False))
        if self._num_ranks > 1:
            self.fit = fit_link(self.steps, self._num_ranks, has_trees=self._has_trees) or self.fit

    @property
    def metrics(self) -> dict[str, float]:
        """``link_latency_s`` and ``link_bandwidth``, see `LinkFit`; NaN without a fit."""
        if self.fit is None:
            return {"link_latency_s": math.nan, "link_bandwidth": math.nan}
        return {"link_latency_s": self.fit.latency_s, "link_bandwidth": self.fit.bandwidth}

    @property
    def why_unknown(self) -> str:
        """Why there is a fit but no number of `metrics`, in a sentence; else empty."""
        if self.fit is None or not math.isnan(self.fit.latency_s):
            return ""
        names = f"{' and '.join(self.metrics)} are unknown"
        if not self.fit.takes_turns:
            return (
                f"{names}, because the buckets of a step share the link: each step counts as one message, and all steps"
                " have the same size."
            )
        first_bytes, last_bytes = self.fit.sizes_bytes[0], self.fit.sizes_bytes[-1]
        if last_bytes >= SIZES_RATIO * first_bytes:
            return f"{names}, because large buckets took little longer than small ones."
        unit = byte_unit(last_bytes)
        sizes = "the same size" if first_bytes == last_bytes else f"{unit.text(first_bytes)} to {unit.text(last_bytes)}"
        return f"{names}, because the buckets have {sizes}: the largest must be twice as large as the smallest."
