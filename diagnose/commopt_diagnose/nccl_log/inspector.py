"""Reads from the JSON lines of NCCL's Inspector, formats v4.0 to v4.4, how long collectives took.

Also finds which collective of a training step each record is, by their order and their sizes.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_commopt.text.formatting import grouped

if TYPE_CHECKING:
    from lightning_commopt.measure.files import RankRecords
    from lightning_commopt.measure.record import StepRecord

_MAX_ORDER = 1024  # calls kept per communicator, kind and rank: as many as the Inspector itself keeps by default
_OPERATIONS = {
    "all_reduce": "AllReduce",
    "barrier": "AllReduce",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
}
_OF_ONE_RANK = ("AllGather", "ReduceScatter")  # NCCL counts one rank's bytes of these, our records all ranks'
_UNTRACKED_BYTES = 8192  # NCCL numbers smaller collectives too, but the Inspector does not write them by default
_MAX_NUMBER = 1 << 63  # a larger one is damage to the line, and may be too large for a float
_MAX_CALLS = 2048  # the last calls of a run that are matched, with at most their square of comparisons


class Measured(NamedTuple):
    """A kind of collective that the Inspector measured."""

    comm_id: str  # the communicator's id, as NCCL's log prints it
    operation: str  # such as AllReduce
    num_bytes: int
    algorithm: str  # such as RING; "" before format v4.2
    protocol: str  # such as SIMPLE; "" before format v4.2


class Matched(NamedTuple):
    """How the Inspector measured one kind of collective, or one collective of a step."""

    name: str  # its communicator; or a collective of a step: "bucket 2", or "forward 0" for the first in forward
    kind: Measured
    times: int  # how often it was measured
    gb_per_s: float  # the median bus bandwidth


Order = dict[int, tuple[Measured, float]]
"""Collectives of one operation in one communicator on one rank, by NCCL's number, with their bus bandwidth in GB/s."""


@dataclass(kw_only=True)
class Inspected:
    """What the Inspector's files contain: objects with their communicator, or since v4.3 after a marker that names it.

    ``in_order`` is filled only with ``keeps_order``.
    """

    keeps_order: bool = False
    bus_gb_per_s: dict[Measured, array[float]] = field(default_factory=dict)
    in_order: dict[tuple[str, int, int, str], Order] = field(default_factory=dict)  # operation, rank, num_ranks, id
    num_dropped: int = 0  # collectives that did not fit the Inspector's memory
    num_records: int = 0
    _header: dict[str, Any] = field(default_factory=dict)  # the header of the last marker
    _left: int = 0  # records that still follow this marker

    def rows(self) -> list[Matched]:
        """Returns each kind under the name of its communicator, ordered by its total bytes, the most first."""
        rows = [Matched(kind.comm_id, kind, len(rates), median(rates)) for kind, rates in self.bus_gb_per_s.items()]
        return sorted(rows, key=lambda row: -row.kind.num_bytes * row.times)

    def read(self, text: str) -> bool:
        """Reads a line; returns whether it is the Inspector's, and not damaged."""
        if not text.startswith('{"') or not any(f'"{name}"' in text for name in ("coll_perf", "dump_stats")):
            return False
        try:
            record = dict(json.loads(text))  # the line begins with a brace, so it is an object
        except (ValueError, RecursionError):
            return False
        header, stats = record.get("header"), record.get("dump_stats")
        if isinstance(stats, dict) and isinstance(header, dict):
            self._header, self._left = header, _integer(stats.get("coll_records"))
            self.num_dropped += _integer(stats.get("coll_dropped_since_last_dump"))
            return True
        if not isinstance(header, dict):
            header = self._header if self._left > 0 else {}
            self._left -= 1
        return self._add(header, record.get("coll_perf"))

    def _add(self, header: dict[str, Any], measured: object) -> bool:
        comm_id, rank = header.get("id"), header.get("rank")
        if not isinstance(measured, dict) or not isinstance(comm_id, str) or not isinstance(rank, int):
            return False
        names = [measured.get(name, "") for name in ("coll", "coll_algo", "coll_proto")]
        microseconds, bandwidth = _number(measured.get("coll_exec_time_us")), _number(measured.get("coll_busbw_gbs"))
        if not all(isinstance(name, str) for name in names) or microseconds is None or bandwidth is None:
            return False
        kind = Measured(comm_id, names[0], _integer(measured.get("coll_msg_size_bytes")), names[1], names[2])
        self.bus_gb_per_s.setdefault(kind, array("d")).append(bandwidth)
        if self.keeps_order:
            key = (names[0], rank, _integer(header.get("n_ranks")), comm_id)
            order = self.in_order.setdefault(key, {})
            order[_integer(measured.get("coll_sn"))] = (kind, bandwidth)
            if len(order) > _MAX_ORDER:
                del order[next(iter(order))]
        self.num_records += 1
        return True


def _integer(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < _MAX_NUMBER else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER else None  # also None for NaN


class _Call(NamedTuple):
    name: str
    num_bytes: int
    step: int


def match_run(inspected: Inspected, ranks: Sequence[RankRecords]) -> tuple[list[Matched], list[str]]:
    """Matches the Inspector's records with the steps of a run.

    NCCL numbers the collectives of each kind in a communicator. A rank's calls are put at every place of this order
    where all sizes agree and a whole step is covered. If all these places make each number the same collective of a
    step, that is returned, in the order of a step; else a line reports that nothing matched.
    """
    issued = (collective for rank in ranks for record in rank.steps for collective in record.collectives)
    if all(collective.source == "lightning" for collective in issued):  # these are recorded with every torch
        return [], ["the run has no records of collectives, which torch has hooks for since 2.14"]
    rates_of: dict[tuple[str, Measured], list[float]] = defaultdict(list)
    problems: Counter[str] = Counter()
    place_in_step: dict[str, int] = {}
    for rank in ranks:
        for operation in sorted({operation for operation, *_ in inspected.in_order}):
            key = (operation, rank.rank, rank.world_size)
            orders = [order for (*start, _), order in inspected.in_order.items() if tuple(start) == key]
            calls = _calls(rank.steps, operation, rank.world_size)
            if not calls or not orders:
                continue
            place_in_step |= {call.name: i for i, call in enumerate(calls) if call.name not in place_in_step}
            fits = [(order, names) for order in orders if (names := _align(calls, order))]
            if len(fits) != 1 or any(len(names) > 1 for names in fits[0][1].values()):
                problems[f"{operation}: {'several places fit' if fits else 'no place fits'}"] += 1
                continue
            ((order, names),) = fits
            for number, (name,) in names.items():
                kind, gb_per_s = order[number]
                rates_of[name, kind].append(gb_per_s)
    failed = {problem.partition(":")[0] for problem in problems}
    rows = [
        Matched(*key, len(rates), median(rates)) for key, rates in rates_of.items() if key[1].operation not in failed
    ]
    return sorted(rows, key=lambda row: place_in_step[row.name]), sorted(problems)


def _calls(steps: Iterable[StepRecord], operation: str, num_ranks: int) -> list[_Call]:
    """Returns the last calls of one kind in whole steps, with the bytes that NCCL counts."""
    divisor = num_ranks if operation in _OF_ONE_RANK else 1
    calls = []
    for record in steps:
        issued = [collective for collective in record.collectives if _OPERATIONS.get(collective.operation) == operation]
        buckets = sorted(record.buckets, key=attrgetter("backward", "index"))
        in_backward = [collective.num_bytes for collective in issued if collective.phase == "backward"]
        are_buckets = in_backward == [bucket.wire_bytes for bucket in buckets]
        numbers: Counter[str] = Counter()
        for collective in issued:
            number = numbers[collective.phase]
            numbers[collective.phase] += 1
            is_bucket = are_buckets and collective.phase == "backward"
            name = f"bucket {buckets[number].index}" if is_bucket else f"{collective.phase} {number}"
            calls.append(_Call(name, collective.num_bytes // divisor, record.step))
    cut = len(calls) - _MAX_CALLS
    return [call for call in calls if cut <= 0 or call.step > calls[cut - 1].step]


def _align(calls: Sequence[_Call], order: Order) -> dict[int, set[str]]:
    """Returns for each of NCCL's numbers the names that calls give it at all places that fit."""
    sizes = {number: kind.num_bytes for number, (kind, _) in order.items()}
    first, last = min(sizes), max(sizes)
    steps = grouped((call.step, i) for i, call in enumerate(calls))
    spans = [
        (indices[0], indices[-1])
        for indices in steps.values()
        if any(calls[i].num_bytes >= _UNTRACKED_BYTES for i in indices)
    ]
    absent = [call.num_bytes if call.num_bytes < _UNTRACKED_BYTES else -1 for call in calls]
    names: dict[int, set[str]] = defaultdict(set)
    for start in _starts(sizes, len(calls)):
        covered = range(max(0, first - start), min(len(calls), last + 1 - start))
        if not any(begin in covered and end in covered for begin, end in spans):
            continue
        if all(sizes.get(start + i, absent[i]) == calls[i].num_bytes for i in covered):
            for i in covered:
                if start + i in sizes:
                    names[start + i].add(calls[i].name)
    return names


def _starts(numbers: Iterable[int], num_calls: int) -> Iterator[int]:
    """Yields where calls may begin so that at least one has a known number. A damaged number may be far away."""
    begin = 0
    for number in sorted(numbers):
        yield from range(max(begin, number - num_calls + 1), number + 1)
        begin = number + 1
