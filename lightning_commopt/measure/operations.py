"""What each kind of collective costs in a step, by phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from lightning_commopt.measure.record import PHASES, StepRecord

_SOURCES = {"lightning": "Lightning's own"}


class Operation(NamedTuple):
    """All collectives of one kind, in the mean of steps on one rank."""

    operation: str  # see `Collective`, as for the next two
    phase: str  # that they were issued in
    source: str  # of them
    num_calls: float  # in a step
    num_bytes: float  # of all of them in a step
    seconds: float | None  # sum of their times in a step, which may overlap; None where it is not known
    num_phases: float = 1.0  # of this name in a step, more than one where gradients are accumulated

    @property
    def label(self) -> str:
        """The operation, and who has issued it if that is known.

        >>> Operation("broadcast", "data", "lightning", 1.0, 8.0, None).label
        "broadcast (Lightning's own)"
        """
        source = _SOURCES.get(self.source, self.source)
        return f"{self.operation} ({source})" if source else self.operation


class OperationTotals:
    """Sums up the collectives of steps, without the first ``num_warmup_steps``."""

    def __init__(self, num_warmup_steps: int = 0) -> None:
        self._num_steps = -num_warmup_steps
        self._num_phases: Counter[str] = Counter()
        self._sums: dict[tuple[str, str, str], list[float]] = defaultdict(partial(list, (0, 0, 0.0)))

    def add(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._num_steps += 1
            if self._num_steps <= 0:
                continue
            self._num_phases.update([phase.name for phase in record.phases])
            for one in record.collectives:
                sums = self._sums[one.phase, one.operation, one.source]
                sums[0] += 1
                sums[1] += one.num_bytes
                sums[2] += 0.0 if one.start_s is None or one.end_s is None else one.end_s - one.start_s

    def operations(self) -> tuple[Operation, ...]:
        """Returns the means of a step, by phase, the most time first."""
        means = []
        for (phase, operation, source), sums in self._sums.items():
            num_calls, num_bytes, seconds = (total / self._num_steps for total in sums)
            known_s, num_phases = seconds if seconds > 0 else None, self._num_phases[phase] / self._num_steps
            means.append(Operation(operation, phase, source, num_calls, num_bytes, known_s, num_phases))
        places = {phase: place for place, phase in enumerate((*PHASES, "pause"))}
        means.sort(key=lambda one: (places.get(one.phase, len(places)), -(one.seconds or 0.0), one.operation))
        return tuple(means)
