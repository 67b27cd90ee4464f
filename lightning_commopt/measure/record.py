"""StepRecord: the phases and buckets of one step on one rank, to JSON and back.

All times are seconds on the rank's own clock, from the clock's origin.

Example: two buckets, ready at 3 and at 5 s, were under way from 3 to 6 and from 5 to 8 s. Communication took 5 s.
Backward hid the first two of them; when the last bucket was ready it had nothing left to compute: 3 s were exposed.

>>> both = [
...     BucketSpan(
...         index=i, backward=0, gradient_bytes=8, wire_bytes=8, ready_s=s, start_s=s, end_s=s + 3, wire=((s, s + 3),)
...     )
...     for i, s in enumerate([3, 5])
... ]
>>> record = StepRecord(step=0, num_samples=4, phases=(Phase("backward", 2, 8),), buckets=tuple(both))
>>> record.totals.comm_s, record.totals.exposed_s, record.totals.overlapped_share
(5.0, 3.0, 0.4)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from lightning_commopt.measure.observer import BucketInfo

# The parts of a step: waiting for the batch; the model; backward with the exposed communication; the optimizer's step;
# and everything else (hooks, schedulers, logging)
PHASES = ("data", "forward", "backward", "optimizer", "other")
EXCHANGE = -1
"""Value of `BucketSpan.backward` for an exchange of DiLoCo, which belongs to no backward."""


def is_diloco(comm_hook: str) -> bool:
    """Returns whether a recorded ``comm_hook`` is DiLoCo, whose name is that of `DiLoCoPlan.sync_method`."""
    return comm_hook == "diloco" or comm_hook.startswith("diloco_")


class Phase(NamedTuple):
    """A part of a step; the name is one of `PHASES`."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class BucketSpan:
    """One bucket from being ready to holding the average, or one exchange of DiLoCo.

    An exchange belongs to the step that applied its result, and may have begun in an earlier one. It is one collective
    from its start to its end, with the compressor's work within.
    """

    index: int  # index of the bucket in DDP's layout, see `BucketInfo`; for an exchange, index of the fragment
    backward: int  # number of the synchronized backward in the step, from 0; `EXCHANGE` for an exchange
    gradient_bytes: int  # size of the gradients, or of the difference
    wire_bytes: int  # payload that this rank passed to collectives for it, in units of an all-reduce
    ready_s: float  # when its last gradient was computed
    start_s: float  # when it left the queue
    end_s: float  # when it held the average
    wire: tuple[tuple[float, float], ...]  # start and end of each of its collectives


class Collective(NamedTuple):
    """One collective of a step, as passed to its process group. Collectives of gradient sync are included."""

    operation: str  # its name in ``torch.distributed``: "all_reduce", "broadcast", ...
    phase: str  # the phase in which it was issued; "pause" between two steps, for example in a validation
    # What issued it: "lightning" for Lightning's check for SIGTERM before each batch; a part of this package, such as
    # "CommTimeMonitor" or "int8 reduce-scatter"; or "" for anything else.
    source: str
    num_bytes: int  # size of its inputs or of its outputs on this rank, whichever is larger
    start_s: float | None  # when it was issued, or when its stream reached it; None if that is unknown on CUDA
    end_s: float | None  # when it had completed, or its caller continued; None if that is unknown on CUDA


class Totals(NamedTuple):
    """The total times and bytes of a step. Each is summed separately, so parts add up to the whole up to rounding."""

    step_s: float  # sum of all phases, without validation between two batches
    data_s: float  # time in the phase "data"; the next four are the other phases
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float
    comm_s: float  # time in which a bucket was ready and not yet averaged: the sum of the next three
    queue_s: float  # time in which buckets were ready, and none was being processed
    compression_s: float  # time in which buckets were being processed, and no collective was under way
    wire_s: float  # time in which a collective was under way, including waits for other ranks
    # The time from when a backward's last bucket is ready until all its buckets are averaged, summed over backwards.
    # The step waits in this time, because backward has nothing left to compute. For exchanges it is the time in which
    # the step waits for one. It is a part of `comm_s`.
    exposed_s: float
    gradient_bytes: int  # size of all gradients that were synchronized
    wire_bytes: int  # payload that this rank passed to collectives, in units of an all-reduce

    @property
    def overlapped_share(self) -> float | None:
        """The part of `comm_s` that backward hides, 0 to 1; None without communication."""
        return 1 - self.exposed_s / self.comm_s if self.comm_s > 0 else None


# These are templates for the % operator because it formats floats twice as fast as f-strings do.
_STEP_JSON = (
    '{"step":%d,"num_samples":%d,'
    + "".join([f'"{name}":%.7f,' for name in Totals._fields[:-2]])
    + '"overlapped_share":%s,"gradient_bytes":%d,"wire_bytes":%d,"phases":[%s],"buckets":[%s],"collectives":[%s],'
    '"waits":[%s],"host_bound_s":%s}'
)
_PHASE_JSON = '["%s",%.7f,%.7f]'
_BUCKET_JSON = (
    '{"index":%d,"backward":%d,"gradient_bytes":%d,"wire_bytes":%d,'
    '"ready_s":%.7f,"start_s":%.7f,"end_s":%.7f,"wire":[%s]}'
)
_WIRE_JSON = "[%.7f,%.7f]"
_COLLECTIVE_JSON = '["%s","%s","%s",%d,%s,%s]'


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step on one rank, with all batches that were accumulated for it."""

    step: int  # optimizer steps before this one, as Lightning counts them for loggers
    num_samples: int  # samples that this rank trained on; 0 if another rank of its tensor-parallel group counts them
    phases: tuple[Phase, ...]  # ordered by time
    buckets: tuple[BucketSpan, ...]  # exchanges, then buckets in the order of `ready_s`; empty if none are observed
    collectives: tuple[Collective, ...] = ()  # empty if none are observed; in the order of their issue
    # Start and end of each wait of the device's computation (on CPU, of the computing thread) for FSDP2's collectives,
    # ordered by time. With DiLoCo they are the waits for exchanges.
    waits: tuple[tuple[float, float], ...] = ()
    # Time in backward in which the device had nothing to do because the host had not yet launched its work; None on
    # CPU. It is known only per bucket: if the device had computed a bucket before the host continued with backward, all
    # the time since the previous bucket counts.
    host_bound_s: float | None = None
    layout: Mapping[int, BucketInfo] = field(default_factory=dict, compare=False)  # the buckets by index; not in JSON

    @property
    def start_s(self) -> float:
        return self.phases[0].start_s

    @property
    def end_s(self) -> float:
        return self.phases[-1].end_s

    @cached_property
    def totals(self) -> Totals:
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, start_s, end_s in self.phases:
            seconds[name] = seconds.get(name, 0.0) + (end_s - start_s)
        comm_s = covered_s([(min(bucket.ready_s, bucket.start_s), bucket.end_s) for bucket in self.buckets])
        worked_s = covered_s([(bucket.start_s, bucket.end_s) for bucket in self.buckets])
        wire_s = covered_s([interval for bucket in self.buckets for interval in bucket.wire])
        exposed_s = 0.0
        for backward, group in groupby(self.buckets, attrgetter("backward")):
            buckets = list(group)
            if backward == EXCHANGE:
                exposed_s += covered_s(self.waits)
                continue
            exposed_s += max([bucket.end_s for bucket in buckets]) - max([bucket.ready_s for bucket in buckets])
        return Totals(
            step_s=sum(seconds.values()),
            **{f"{name}_s": seconds[name] for name in PHASES},
            comm_s=comm_s,
            queue_s=max(0.0, comm_s - worked_s),
            compression_s=max(0.0, worked_s - wire_s),
            wire_s=wire_s,
            exposed_s=min(comm_s, exposed_s),
            gradient_bytes=sum([bucket.gradient_bytes for bucket in self.buckets]),
            wire_bytes=sum([bucket.wire_bytes for bucket in self.buckets]),
        )

    def to_json(self) -> str:
        """Returns one line of JSON: `totals`, then the other fields, with times to a tenth of a microsecond.

        It is written while training runs, and takes half the time of `json.dumps`.
        """
        totals, share = self.totals, self.totals.overlapped_share
        return _STEP_JSON % (
            self.step,
            self.num_samples,
            *totals[:-2],
            "null" if share is None else round(share, 7),
            totals.gradient_bytes,
            totals.wire_bytes,
            ",".join([_PHASE_JSON % phase for phase in self.phases]),
            ",".join(
                [
                    _BUCKET_JSON
                    % (
                        *(b.index, b.backward, b.gradient_bytes, b.wire_bytes, b.ready_s, b.start_s, b.end_s),
                        ",".join([_WIRE_JSON % interval for interval in b.wire]),
                    )
                    for b in self.buckets
                ]
            ),
            ",".join([_COLLECTIVE_JSON % (*c[:4], *map(_seconds_json, c[4:])) for c in self.collectives]),
            ",".join([_WIRE_JSON % interval for interval in self.waits]),
            _seconds_json(self.host_bound_s),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], layout: Mapping[int, BucketInfo] | None = None) -> StepRecord:
        """Returns the record of a parsed line of `to_json`.

        Raises a KeyError, OverflowError, TypeError or ValueError if a field is missing, or has another type or shape.
        """
        return cls(
            step=int(values["step"]),
            num_samples=int(values["num_samples"]),
            phases=tuple(Phase(str(name), float(start_s), float(end_s)) for name, start_s, end_s in values["phases"]),
            buckets=tuple(
                BucketSpan(
                    **{name: number(bucket[name]) for name, number in _BUCKET_NUMBERS.items()},
                    wire=tuple((float(start_s), float(end_s)) for start_s, end_s in bucket["wire"]),
                )
                for bucket in values["buckets"]
            ),
            collectives=tuple(
                Collective(
                    *(str(operation), str(phase), str(source), int(num_bytes)),
                    start_s=None if start_s is None else float(start_s),
                    end_s=None if end_s is None else float(end_s),
                )
                for operation, phase, source, num_bytes, start_s, end_s in values.get("collectives", ())
            ),
            waits=tuple((float(start_s), float(end_s)) for start_s, end_s in values.get("waits", ())),
            host_bound_s=None if (bound_s := values.get("host_bound_s")) is None else float(bound_s),
            layout=layout or {},
        )


_BUCKET_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("index", "backward", "gradient_bytes", "wire_bytes"), int),
    **dict.fromkeys(("ready_s", "start_s", "end_s"), float),
}


def _seconds_json(at_s: float | None) -> str:
    return "null" if at_s is None else f"{at_s:.7f}"


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


def clock_shift_s(steps: Sequence[StepRecord], first: Sequence[StepRecord]) -> float | None:
    """Returns the offset from a rank's clock to the first rank's clock, from the same steps on both.

    A bucket's last collective ends at nearly the same moment on all ranks, with smaller differences than those between
    hosts' clocks. The offset is the median difference between these ends; None if the two ranks have no bucket in
    common.
    """
    ends_s, first_ends_s = _ends_s(steps), _ends_s(first)
    differences = [first_ends_s[key] - ends_s[key] for key in first_ends_s.keys() & ends_s.keys()]
    return median(differences) if differences else None


def _ends_s(steps: Sequence[StepRecord]) -> dict[tuple[int, int, int], float]:
    return {
        (record.step, bucket.backward, bucket.index): bucket.wire[-1][1]
        for record in steps
        for bucket in record.buckets
        if bucket.wire
    }
