"""Operations: the cost of a step's collectives by kind, and how long computation waits for them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from lightning_commopt.measure.record import PHASES, StepRecord
from lightning_commopt.measure.statistics import ratio
from lightning_commopt.text.formatting import number, percent

MAX_DECIMALS = 4  # decimals of milliseconds, so that they are shown to a tenth of a microsecond
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}  # powers of 1000, as rates of links


class Operation(NamedTuple):
    """All collectives of one kind on one rank: their mean number, bytes and times per step."""

    operation: str  # defined by `Collective`, as are the next two
    phase: str
    source: str
    num_calls: float  # collectives in a step
    num_bytes: float  # bytes of all collectives of a step
    seconds: float | None  # sum of the collectives' times in a step, which may overlap; None if unknown
    num_phases: float = 1.0  # phases of this name in a step, more than one where gradients are accumulated
    exposed_s: float | None = None  # the part of `seconds` in which computation waits; None if unknown

    @property
    def label(self) -> str:
        """The operation, and what has issued it if that is known.

        >>> Operation("broadcast", "data", "lightning", 1.0, 8.0, None).label
        "broadcast (Lightning's own)"
        """
        source = "Lightning's own" if self.source == "lightning" else self.source
        return f"{self.operation} ({source})" if source else self.operation


class OperationTotals:
    """Sums up the collectives of steps, without the first ``num_warmup_steps``."""

    def __init__(self, num_warmup_steps: int = 0) -> None:
        self._num_steps = -num_warmup_steps
        self._num_phases: Counter[str] = Counter()
        self._sums: dict[tuple[str, str, str], list[float]] = defaultdict(partial(list, (0, 0, 0.0, 0.0)))
        self._has_known_waits: set[tuple[str, str, str]] = set()
        self._backward_s = self._host_bound_s = 0.0

    def add(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._num_steps += 1
            if self._num_steps <= 0:
                continue
            self._num_phases.update([phase.name for phase in record.phases])
            if record.host_bound_s is not None:
                self._backward_s += record.totals.backward_s - record.totals.exposed_s
                self._host_bound_s += record.host_bound_s
            for collective, waited_s in zip(record.collectives, exposed_s(record), strict=True):
                kind = collective.phase, collective.operation, collective.source
                sums = self._sums[kind]
                sums[0] += 1
                sums[1] += collective.num_bytes
                start_s, end_s = collective.start_s, collective.end_s
                sums[2] += 0.0 if start_s is None or end_s is None else end_s - start_s
                if waited_s is not None:
                    self._has_known_waits.add(kind)
                    sums[3] += waited_s

    def operations(self) -> tuple[Operation, ...]:
        """Returns the means per step, by phase, those with the most time first."""
        means = []
        for (phase, operation, source), sums in self._sums.items():
            num_calls, num_bytes, seconds, exposed_s = (total / self._num_steps for total in sums)
            is_known = (phase, operation, source) in self._has_known_waits
            times_s = (seconds, exposed_s if is_known else None) if seconds > 0 else (None, None)
            num_phases = self._num_phases[phase] / self._num_steps
            means.append(
                Operation(operation, phase, source, num_calls, num_bytes, times_s[0], num_phases, exposed_s=times_s[1])
            )
        places = {phase: place for place, phase in enumerate((*PHASES, "pause"))}
        means.sort(key=lambda mean: (places.get(mean.phase, len(places)), -(mean.seconds or 0.0), mean.operation))
        return tuple(means)

    @property
    def host_bound_share(self) -> float:
        """Share of backward's computing time in which the device waited for the host; NaN on CPU."""
        return ratio(self._host_bound_s, self._backward_s)


_OPERATION_COLUMNS = ("phase", "operation", "calls", "bytes", "ms", "of step", "exposed, ms")


def operation_columns(rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the headings of `operation_rows`."""
    return _OPERATION_COLUMNS[: len(rows[0])] if rows else _OPERATION_COLUMNS


def operation_rows(operations: Sequence[Operation], step_s: float) -> list[tuple[str, ...]]:
    """Returns a row for each kind of collectives, with a cell for the exposed time if any is known.

    An unknown time is a dash.
    """
    has_exposed = any(operation.exposed_s is not None for operation in operations)
    rows: list[tuple[str, ...]] = []
    for operation in operations:
        seconds, exposed_s = (
            math.nan if time_s is None else time_s for time_s in (operation.seconds, operation.exposed_s)
        )
        times = (
            number(1e3 * seconds, max_decimals=MAX_DECIMALS),
            percent(ratio(seconds, step_s)),
            *([number(1e3 * exposed_s, max_decimals=MAX_DECIMALS)] if has_exposed else []),
        )
        rows.append(
            (operation.phase, operation.label, f"{operation.num_calls:.3g}", size_text(operation.num_bytes), *times)
        )
    return rows


def exposed_s(record: StepRecord) -> tuple[float | None, ...]:
    """Returns, for each collective, how long computation waits for it; None if that was not observed.

    If several collectives are under way, a wait counts for the one that ends first. On CPU any call may block, and only
    waits for FSDP2 are recorded, so a collective without one is unknown there.

    >>> from lightning_commopt.measure.record import Collective, Phase
    >>> gather = Collective("all_gather", "forward", "", 8, start_s=1.0, end_s=3.0)
    >>> record = StepRecord(
    ...     step=0,
    ...     num_samples=4,
    ...     phases=(Phase("forward", 0, 9),),
    ...     buckets=(),
    ...     collectives=(gather, gather._replace(start_s=2.0, end_s=5.0), gather._replace(end_s=None)),
    ...     waits=((2.0, 4.0), (6.0, 7.0)),
    ... )
    >>> exposed_s(record)
    (1.0, 1.0, None)
    """
    timed = [
        (collective.start_s, collective.end_s, place)
        for place, collective in enumerate(record.collectives)
        if collective.start_s is not None and collective.end_s is not None
    ]
    timed.sort(reverse=True)
    waited_s: list[float | None] = [None] * len(record.collectives)
    for *_, place in timed if record.waits and record.host_bound_s is not None else ():
        waited_s[place] = 0.0
    under_way: list[tuple[float, float, int]] = []
    for reached_s, until_s in record.waits:
        while timed and timed[-1][0] < until_s:
            under_way.append(timed.pop())
        under_way = sorted([piece for piece in under_way if piece[1] > reached_s], key=itemgetter(1))
        for start_s, end_s, place in under_way:
            part_s = min(end_s, until_s) - max(start_s, reached_s)
            if part_s > 0:
                waited_s[place] = (waited_s[place] or 0.0) + part_s
                reached_s = min(end_s, until_s)
    return tuple(waited_s)


def size_text(num_bytes: float) -> str:
    """Returns bytes in the largest unit in which they are at least one.

    >>> [size_text(num_bytes) for num_bytes in (12, 2.5e6, 1.224e9)]
    ['12.0 B', '2.50 MB', '1.22 GB']
    """
    unit = max((name for name in _UNITS if _UNITS[name] <= num_bytes), key=_UNITS.__getitem__, default="B")
    return f"{number(num_bytes / _UNITS[unit])} {unit}"
