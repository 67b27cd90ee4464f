"""The costs of a step that decide what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_commopt.measure.exposed_share import share_of_step
from lightning_commopt.text.formatting import short_percent

_WORTH_IT = 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one step costs, in seconds and bytes: means over steps and ranks, by the names of `Steps.statistics`.

    Attributes:
        straggler_rank: that the others wait for; None if there is none.
    """

    step_s: float
    data_s: float
    comm_s: float
    exposed_s: float
    exposed_wait_s: float
    straggler_rank: int | None
    straggler_slowdown: float

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Costs:
        """Takes the metrics of `Steps.statistics`; unknown waits count as none."""
        rank, wait_s = int(metrics["straggler_rank"]), metrics["exposed_wait_s"]
        return cls(
            **{name: metrics[name] for name in ("step_s", "data_s", "comm_s", "exposed_s", "straggler_slowdown")},
            exposed_wait_s=0.0 if math.isnan(wait_s) else wait_s,
            straggler_rank=rank if rank >= 0 else None,
        )

    def is_worth(self, saved_s: float) -> bool:
        """Returns whether saving a time is worth the effort."""
        return saved_s >= _WORTH_IT * self.step_s

    def share(self, seconds: float) -> str:
        return short_percent(share_of_step(seconds, self.step_s))

    def speedup_bound(self, saved_s: float) -> str:
        """Returns in words how much faster training would be if steps were shorter by a time."""
        if not saved_s < self.step_s:
            return "faster by an unknown factor"
        return f"at most {self.step_s / (self.step_s - saved_s):.2f} times as fast"
