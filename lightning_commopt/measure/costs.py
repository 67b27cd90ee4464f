"""The numbers of a step that decide what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_commopt.measure.exposed_share import share_of_step
from lightning_commopt.text.formatting import short_percent

_WORTH_IT = 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one step costs, in seconds and bytes, mean over steps and ranks.

    Attributes:
        step_s: of the whole step.
        data_s: before its batches were there.
        backward_s: that backward computes, without waiting for communication.
        comm_s: in which a bucket was ready and not yet averaged.
        wire_s: the part of it in which a collective was under way.
        compression_s: the part of it in which buckets were compressed, and no collective was under way.
        wait_s: the part of ``wire_s`` in which a rank waits for a slower one.
        exposed_s: the part of ``comm_s`` that the step waits for.
        exposed_wait_s: the part of ``exposed_s`` in which a rank waits for a slower one.
        gradient_bytes: that are synchronized.
        compression_ratio: gradients over what travels.
        num_buckets: that the gradients travel in; 0 where none were observed.
        comm_hook: the name of what averages them.
        is_lossy: whether it changes them.
        straggler_rank: that the others wait for.
        straggler_slowdown: its delay as a share of what they compute.
    """

    step_s: float
    data_s: float
    backward_s: float
    comm_s: float
    wire_s: float
    compression_s: float
    wait_s: float
    exposed_s: float
    exposed_wait_s: float
    gradient_bytes: float
    compression_ratio: float
    num_buckets: int
    comm_hook: str
    is_lossy: bool
    straggler_rank: int | None
    straggler_slowdown: float

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, num_buckets: int, comm_hook: str, is_lossy: bool) -> Costs:
        """Takes them from what `Steps.statistics` gives; unknown waits count as none.

        Raises:
            KeyError: a metric is missing.
        """
        same = ("step_s", "data_s", "comm_s", "wire_s", "compression_s", "exposed_s", "gradient_bytes")
        rank = int(metrics["straggler_rank"])
        return cls(
            **{name: metrics[name] for name in (*same, "compression_ratio", "straggler_slowdown")},
            **{name: 0.0 if math.isnan(metrics[name]) else metrics[name] for name in ("wait_s", "exposed_wait_s")},
            backward_s=max(0.0, metrics["backward_s"] - metrics["exposed_s"]),
            num_buckets=num_buckets,
            comm_hook=comm_hook,
            is_lossy=is_lossy,
            straggler_rank=rank if rank >= 0 else None,
        )

    @property
    def sending_s(self) -> float:
        """Exposed time in which no rank waits for a slower one."""
        return max(0.0, self.exposed_s - self.exposed_wait_s)

    @property
    def transfer_s(self) -> float:
        """Time on the wire in which no rank waits for a slower one."""
        return max(0.0, self.wire_s - self.wait_s)

    @property
    def hideable_s(self) -> float:
        """The part of the exposed time that backward could hide besides what it hides now, at most."""
        return min(self.sending_s, max(0.0, self.backward_s - (self.comm_s - self.exposed_s)))

    def is_worth(self, saved_s: float) -> bool:
        """Returns whether a time is enough of a step to do something about it."""
        return saved_s >= _WORTH_IT * self.step_s

    def share(self, seconds: float) -> str:
        return short_percent(share_of_step(seconds, self.step_s))

    def speedup_bound(self, saved_s: float) -> str:
        """Returns how much faster training would be if steps were shorter by a time."""
        if not saved_s < self.step_s:
            return "faster by an unknown factor"
        return f"at most {self.step_s / (self.step_s - saved_s):.2f} times as fast"
