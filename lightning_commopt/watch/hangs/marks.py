"""Marks: where a rank is, in memory that outlives it; and the phases of training that they name, with their limits.

A rank writes a mark in about a microsecond, without a lock. A reader may meet a mark that is just being written: it has
a number of its own, and is read the next time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import tempfile
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

_MARK = struct.Struct("<dQHHxxxxq")
_NUM_MARKS = 2048
NUM_BYTES = _MARK.size * _NUM_MARKS

PHASE, BUCKET_READY, BUCKET_START, COLLECTIVE_START, COLLECTIVE_END, BUCKET_END, BATCH = range(1, 8)
"""Kinds of marks. ``code`` of a phase is its index in `PHASES`."""

SLOW_FACTOR = 10
"""How many times ``after_s`` a phase may last that is slow by nature."""

_SHOWN_FACTOR = 3
_NUM_SHOWN = 50


@dataclass(frozen=True)
class Phase:
    """A part of training that a rank can be in.

    Attributes:
        name: as reports give it.
        where: as a sentence has it after "is still".
        is_slow: whether it may always take ``10 * after_s``, as anything may run in it: a checkpoint, a first batch.
    """

    name: str
    where: str
    is_slow: bool = False


PHASES = (
    Phase("setup", "in the setup of the fit", is_slow=True),
    Phase("data", "starting the dataloader", is_slow=True),
    Phase("data", "in the dataloader"),
    Phase("forward", "in forward"),
    Phase("backward", "in backward"),
    Phase("optimizer", "in the optimizer"),
    Phase("callbacks", "in callbacks and logging", is_slow=True),
    Phase("callbacks", "in the end of an epoch", is_slow=True),
    Phase("checkpoint", "writing a checkpoint", is_slow=True),
    Phase("callbacks", "in the end of the run", is_slow=True),
    *(
        phase
        for stage in ("validation", "test", "predict")
        for phase in (
            Phase(stage, f"in the start or end of {stage}", is_slow=True),
            Phase(stage, f"in {stage}"),
            Phase(stage, f"in the dataloader of {stage}"),
        )
    ),
)
SETUP, DATA_START, DATA, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS, EPOCH_END, CHECKPOINT, END = range(10)
EVALUATION_START, EVALUATION_BATCH, EVALUATION_DATA = range(3)
"""To be added to `first_of_stage`."""


def first_of_stage(stage: str) -> int:
    """Returns the number of a stage's first phase.

    Args:
        stage: "validation", "test" or "predict".
    """
    return next(number for number, phase in enumerate(PHASES) if phase.name == stage)


class PhaseTimes:
    """How long the phases of a rank have lasted in this run.

    Args:
        after_s: seconds without progress that a phase is allowed at least.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._shown: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_SHOWN))

    def add(self, phase: int, seconds: float) -> None:
        """A phase has ended.

        Args:
            phase: index into `PHASES`.
            seconds: that it has lasted without any progress within.
        """
        self._shown[phase].append(seconds)

    def limit_s(self, phase: int) -> float:
        """Returns for how long a phase may show no progress.

        Three times the longest of its last 50 times, but at least ``after_s``; at least ten times ``after_s`` where it
        is slow by nature, or has not ended before: a first forward compiles.
        """
        shown = self._shown[phase]
        base = self._after_s * (SLOW_FACTOR if PHASES[phase].is_slow or not shown else 1)
        # The first time counts for nothing later, if there are others: it is when things are made.
        later = [*shown][1:] if len(shown) < _NUM_SHOWN else shown
        return max(base, _SHOWN_FACTOR * max(later or shown, default=0.0))


class Mark(NamedTuple):
    """Something that has happened on a rank.

    Attributes:
        at_s: when, by the monotonic clock of its host.
        number: from 1, in the order in which they were written.
        kind: one of this module's kinds.
        code: the phase, or for buckets 1 for the last one of a backward.
        value: the step for a phase, the index of a bucket, or of a batch.
    """

    at_s: float
    number: int
    kind: int
    code: int
    value: int


class MarkWriter:
    """Writes marks, on any thread.

    Attributes:
        fd: of the memory, to hand to another process, then to close.
    """

    def __init__(self) -> None:
        self.fd = anonymous_file("commopt-marks")
        os.ftruncate(self.fd, NUM_BYTES)
        self._memory = mmap.mmap(self.fd, NUM_BYTES)
        self._numbers = itertools.count(1)  # next() is atomic

    def write(self, kind: int, code: int = 0, value: int = 0) -> None:
        """Writes one mark, over the oldest."""
        number = next(self._numbers)
        _MARK.pack_into(self._memory, number % _NUM_MARKS * _MARK.size, time.monotonic(), number, kind, code, value)


def anonymous_file(name: str) -> int:
    """Returns a descriptor of a new file without a place in any folder: in memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_marks(memory: bytes | mmap.mmap) -> list[Mark]:
    """Returns the marks in memory, the oldest first.

    Args:
        memory: ``NUM_BYTES`` bytes; fewer, as a file that was cut has, give what is whole.
    """
    whole = memory[: len(memory) // _MARK.size * _MARK.size]
    marks = [Mark(*fields) for fields in _MARK.iter_unpack(whole)]
    return sorted((mark for mark in marks if mark.kind), key=lambda mark: mark.number)
