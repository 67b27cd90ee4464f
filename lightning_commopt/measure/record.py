"""StepRecord: what one step cost on one rank; frozen, JSON both ways.

All times are seconds on the rank's own clock, from the clock's origin.

Example: two buckets, ready at 3 and at 5 s, were on their way from 3 to 6 and from 5 to 8 s. The exchange took 5 s.
Backward covered the first two, as it had nothing left to compute when the last bucket was ready: 3 s were exposed.

>>> both = [
...     BucketSpan(
...         index=i, backward=0, gradient_bytes=8, wire_bytes=8, ready_s=s, start_s=s, end_s=s + 3, wire=((s, s + 3),)
...     )
...     for i, s in enumerate([3, 5])
... ]
>>> record = StepRecord(step=0, num_samples=4, phases=(Phase("backward", 2, 8),), buckets=tuple(both))
>>> record.exchange_s, record.exposed_s, record.overlapped_share
(5.0, 3.0, 0.4)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""What a step is made of: waiting for the batch; the model; backward with all of the exchange that it waits for; the
optimizer's step; and what is none of these (hooks, schedulers, logging)."""


class Phase(NamedTuple):
    """A stretch of a step.

    Attributes:
        name: one of `PHASES`.
        start_s: when it began.
        end_s: when it ended.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class BucketSpan:
    """One bucket's way.

    Attributes:
        index: of the bucket.
        backward: which synchronised backward of the step it belongs to, from 0.
        gradient_bytes: of its gradients.
        wire_bytes: payload that this rank handed to collectives for it, in terms of an all-reduce.
        ready_s: when its last gradient was there.
        start_s: when its turn came.
        end_s: when it held the average.
        wire: begin and end of each of its collectives.
    """

    index: int
    backward: int
    gradient_bytes: int
    wire_bytes: int
    ready_s: float
    start_s: float
    end_s: float
    wire: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step on one rank, with all batches that were accumulated for it.

    Attributes:
        step: optimizer steps before this one, as Lightning counts them for loggers.
        num_samples: of this rank.
        phases: in the order of time.
        buckets: in the order in which they were ready; empty with one rank, or where nobody sees them.
    """

    step: int
    num_samples: int
    phases: tuple[Phase, ...]
    buckets: tuple[BucketSpan, ...]

    @property
    def start_s(self) -> float:
        """When the step began."""
        return self.phases[0].start_s

    @property
    def end_s(self) -> float:
        """When the step ended."""
        return self.phases[-1].end_s

    @property
    def step_s(self) -> float:
        """The sum of all phases; validation between two batches is none of them."""
        return sum(phase.end_s - phase.start_s for phase in self.phases)

    def phase_s(self, name: str) -> float:
        """Returns the seconds in one of `PHASES`."""
        return sum(phase.end_s - phase.start_s for phase in self.phases if phase.name == name)

    @cached_property
    def exchange_s(self) -> float:
        """Time in which at least one bucket was being compressed or sent."""
        return covered_s([(bucket.start_s, bucket.end_s) for bucket in self.buckets])

    @cached_property
    def wire_s(self) -> float:
        """Time in which at least one collective was under way. What a rank waits for its peers is in it."""
        return covered_s([interval for bucket in self.buckets for interval in bucket.wire])

    @property
    def compression_s(self) -> float:
        """Time in which buckets were being worked on, and no collective was under way."""
        return _compression_s(self.exchange_s, self.wire_s)

    @cached_property
    def exposed_s(self) -> float:
        """From a backward's last bucket being ready to all its buckets being done, summed over backwards.

        Nothing is left to compute then: it is what the step waits for.
        """
        exposed = 0.0
        for _, group in groupby(self.buckets, attrgetter("backward")):
            buckets = list(group)
            exposed += max([bucket.end_s for bucket in buckets]) - max([bucket.ready_s for bucket in buckets])
        return exposed

    @property
    def overlapped_share(self) -> float | None:
        """The part of `exchange_s` that backward covers, 0 to 1; None without an exchange."""
        return _overlapped_share(self.exchange_s, self.exposed_s)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that were exchanged."""
        return sum([bucket.gradient_bytes for bucket in self.buckets])

    @property
    def wire_bytes(self) -> int:
        """Payload that this rank handed to collectives, in terms of an all-reduce."""
        return sum([bucket.wire_bytes for bucket in self.buckets])

    def to_dict(self) -> dict[str, Any]:
        """Returns what a line of JSON holds: phases and buckets, and in front of them what is derived."""
        values: dict[str, Any] = json.loads(self.to_json())
        return values

    def to_json(self) -> str:
        """Returns the same as one line of JSON, times to a tenth of a microsecond.

        It is written while training runs, and takes a fraction of what `json.dumps` of a dict does.
        """
        phases = dict.fromkeys(PHASES, 0.0)
        for name, start_s, end_s in self.phases:
            phases[name] += end_s - start_s
        exchange_s, wire_s, exposed_s = self.exchange_s, self.wire_s, self.exposed_s
        compression_s, share = _compression_s(exchange_s, wire_s), _overlapped_share(exchange_s, exposed_s)
        return (
            f'{{"step":{self.step},"num_samples":{self.num_samples},"step_s":{sum(phases.values()):.7f},'
            + "".join([f'"{name}_s":{phase_s:.7f},' for name, phase_s in phases.items()])
            + f'"exchange_s":{exchange_s:.7f},"wire_s":{wire_s:.7f},"compression_s":{compression_s:.7f},'
            f'"exposed_s":{exposed_s:.7f},"overlapped_share":{"null" if share is None else round(share, 7)},'
            f'"gradient_bytes":{self.gradient_bytes},"wire_bytes":{self.wire_bytes},"phases":['
            + ",".join([f'["{name}",{start_s:.7f},{end_s:.7f}]' for name, start_s, end_s in self.phases])
            + '],"buckets":['
            + ",".join([_bucket_to_json(bucket) for bucket in self.buckets])
            + "]}"
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepRecord:
        """Makes a record from what `to_dict` returned.

        Raises:
            KeyError: something is missing.
            TypeError: something is of another kind.
            ValueError: something has another shape.
        """
        return cls(
            step=int(values["step"]),
            num_samples=int(values["num_samples"]),
            phases=tuple(Phase(str(name), float(start_s), float(end_s)) for name, start_s, end_s in values["phases"]),
            buckets=tuple(_bucket_from_dict(bucket) for bucket in values["buckets"]),
        )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals.

    >>> covered_s([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - (start if start > reached else reached)
            reached = end
    return covered


def _compression_s(exchange_s: float, wire_s: float) -> float:
    return max(0.0, exchange_s - wire_s)  # they are sums of different terms, and rounded apart


def _overlapped_share(exchange_s: float, exposed_s: float) -> float | None:
    return max(0.0, 1 - exposed_s / exchange_s) if exchange_s > 0 else None


def _bucket_to_json(bucket: BucketSpan) -> str:
    wire = ",".join([f"[{start_s:.7f},{end_s:.7f}]" for start_s, end_s in bucket.wire])
    return (
        f'{{"index":{bucket.index},"backward":{bucket.backward},'
        f'"gradient_bytes":{bucket.gradient_bytes},"wire_bytes":{bucket.wire_bytes},'
        f'"ready_s":{bucket.ready_s:.7f},"start_s":{bucket.start_s:.7f},"end_s":{bucket.end_s:.7f},"wire":[{wire}]}}'
    )


def _bucket_from_dict(values: dict[str, Any]) -> BucketSpan:
    return BucketSpan(
        index=int(values["index"]),
        backward=int(values["backward"]),
        gradient_bytes=int(values["gradient_bytes"]),
        wire_bytes=int(values["wire_bytes"]),
        ready_s=float(values["ready_s"]),
        start_s=float(values["start_s"]),
        end_s=float(values["end_s"]),
        wire=tuple((float(start_s), float(end_s)) for start_s, end_s in values["wire"]),
    )
