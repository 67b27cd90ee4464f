"""The costs of a step that decide what is worth trying."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_commopt.measure.exposed_share import share_of_step
from lightning_commopt.text.formatting import short_percent

_WORTH_IT = 0.05


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one step costs, in seconds and bytes: means over steps and ranks, by the names of `Steps.statistics`.

    Attributes:
        backward_s: that backward computes, without waiting for communication.
        num_buckets: that the gradients travel in; 0 where none were observed.
        comm_hook: the name of what averages the gradients.
        is_lossy: whether it changes them.
        alternatives: compressors that send less, most bytes first, each with ``name``, ``share`` of the bytes that
            travel now, ``error_bound`` and ``is_last_resort``; as the compressors' classes claim.
        milder: the name of a compressor that sends more; empty if none is worth it.
        cheaper_with: the option that makes ``comm_hook`` cheaper, in words; empty if none does.
        straggler_rank: that the others wait for; None if there is none.
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
    alternatives: Sequence[Mapping[str, Any]]
    milder: str
    cheaper_with: str
    straggler_rank: int | None
    straggler_slowdown: float

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, float],
        *,
        num_buckets: int,
        comm_hook: str,
        is_lossy: bool,
        alternatives: Sequence[Mapping[str, Any]] = (),
        milder: str = "",
        cheaper_with: str = "",
    ) -> Costs:
        """Takes the metrics of `Steps.statistics`; unknown waits count as none."""
        same = ("step_s", "data_s", "comm_s", "wire_s", "compression_s", "exposed_s", "gradient_bytes")
        rank = int(metrics["straggler_rank"])
        return cls(
            **{name: metrics[name] for name in (*same, "compression_ratio", "straggler_slowdown")},
            **{name: 0.0 if math.isnan(metrics[name]) else metrics[name] for name in ("wait_s", "exposed_wait_s")},
            backward_s=max(0.0, metrics["backward_s"] - metrics["exposed_s"]),
            num_buckets=num_buckets,
            comm_hook=comm_hook,
            is_lossy=is_lossy,
            alternatives=alternatives,
            milder=milder,
            cheaper_with=cheaper_with,
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
        """Returns whether saving a time is worth the effort."""
        return saved_s >= _WORTH_IT * self.step_s

    def share(self, seconds: float) -> str:
        return short_percent(share_of_step(seconds, self.step_s))

    def speedup_bound(self, saved_s: float) -> str:
        """Returns in words how much faster training would be if steps were shorter by a time."""
        if not saved_s < self.step_s:
            return "faster by an unknown factor"
        return f"at most {self.step_s / (self.step_s - saved_s):.2f} times as fast"
