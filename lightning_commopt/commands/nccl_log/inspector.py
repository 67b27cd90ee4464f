"""NCCL's Inspector: how long collectives took, from its JSON lines of the formats v4.0 to v4.4."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

_MAX_ORDER = 1024  # of each communicator, kind and rank; as many as the Inspector itself keeps by default


class Measured(NamedTuple):
    """A kind of collective that the Inspector measured."""

    comm_id: str  # as NCCL's log prints it
    operation: str  # such as AllReduce
    num_bytes: int
    algorithm: str  # such as RING; "" before format v4.2
    protocol: str  # such as SIMPLE, likewise


class Matched(NamedTuple):
    """How the Inspector measured one kind of collective, or one collective of a step."""

    name: str  # its communicator; or such as "bucket 2", "forward 0" for the first of its kind in this phase
    kind: Measured
    times: int
    gb_per_s: float  # the median bus bandwidth


Order = dict[int, tuple[Measured, float]]
"""By NCCL's number, collectives of one operation in one communicator on one rank, and their bus bandwidth in GB/s."""


@dataclass(kw_only=True)
class Inspected:
    """What the Inspector's files say."""

    bus_gb_per_s: dict[Measured, array[float]] = field(default_factory=dict)
    in_order: dict[tuple[str, int, int, str], Order] = field(default_factory=dict)  # operation, rank, ranks, comm_id
    num_dropped: int = 0  # collectives that did not fit the Inspector's memory
    num_records: int = 0

    def rows(self) -> list[Matched]:
        """Returns each kind under the name of its communicator, those of most bytes in all first."""
        found = [Matched(kind.comm_id, kind, len(each), median(each)) for kind, each in self.bus_gb_per_s.items()]
        return sorted(found, key=lambda row: -row.kind.num_bytes * row.times)


class InspectorReader:
    """Reads the Inspector's objects: each with its communicator, or since v4.3 after a marker that names it."""

    def __init__(self, *, keeps_order: bool = False) -> None:
        self.found = Inspected()
        self._keeps_order = keeps_order
        self._header: dict[str, Any] = {}
        self._left = 0

    def read(self, text: str) -> bool:
        """Reads a line; returns whether it is the Inspector's, and not damaged."""
        if not text.startswith('{"') or not any(f'"{name}"' in text for name in ("coll_perf", "dump_stats")):
            return False
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(record, dict):
            return False
        header, stats = record.get("header"), record.get("dump_stats")
        if isinstance(stats, dict) and isinstance(header, dict):
            self._header, self._left = header, _integer(stats.get("coll_records"))
            self.found.num_dropped += _integer(stats.get("coll_dropped_since_last_dump"))
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
        self.found.bus_gb_per_s.setdefault(kind, array("d")).append(bandwidth)
        if self._keeps_order:
            key = (names[0], rank, _integer(header.get("n_ranks")), comm_id)
            order = self.found.in_order.setdefault(key, {})
            order[_integer(measured.get("coll_sn"))] = (kind, bandwidth)
            if len(order) > _MAX_ORDER:
                del order[next(iter(order))]
        self.found.num_records += 1
        return True


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
