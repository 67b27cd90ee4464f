"""Marks: the progress of a rank, in memory that outlives it; and the phases of training, with their limits.

A rank writes a mark in about a microsecond, without a lock. A reader may see a mark that is just being written: marks
are numbered, so it is read the next time.
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

from lightning_commopt.watch import times

_MARK = struct.Struct("<dQHHxxxxq")

_NUM_MARKS = 2048
"""Number of marks that are kept, 64 KiB. It is far more than a rank writes between two looks of its watcher, and covers
some steps before a hang: each phase and batch has one mark, each bucket four."""

NUM_BYTES = _MARK.size * _NUM_MARKS

PHASE, BUCKET_READY, BUCKET_START, COLLECTIVE_START, COLLECTIVE_END, BUCKET_END, BATCH = range(1, 8)
"""Kinds of marks, from BUCKET_START on in the order of a `BucketSync`'s events. A phase has its index in `PHASES`."""

EXCHANGE_DUE, EXCHANGE_APPLIED = 8, 9
"""Kinds of marks of an exchange of DiLoCo, whose result a step waits for in between."""


_SHOWN_FACTOR = 3
"""Multiple of its longest time so far that a phase may last. It is a judgement: durations of a phase rarely differ by
more."""

_NUM_SHOWN = 50
"""Number of last times of a phase of which the longest counts, so that a limit falls again after a slow step."""


@dataclass(frozen=True)
class Phase:
    """A part of training that a rank can be in."""

    name: str  # its name in reports
    where: str  # completes "is still" in sentences
    # Whether it may always last ``10 * after_s``, because anything may run in it, as in a checkpoint or a first batch.
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
# Indices into `PHASES`, in its order.
SETUP, DATA_START, DATA, FORWARD, BACKWARD, OPTIMIZER, CALLBACKS, EPOCH_END, CHECKPOINT, END = range(10)
EVALUATION_START, EVALUATION_BATCH, EVALUATION_DATA = range(3)
"""To be added to `first_of_stage`."""


def first_of_stage(stage: str) -> int:
    """Returns the index of the first phase of "validation", "test" or "predict"."""
    return next(number for number, phase in enumerate(PHASES) if phase.name == stage)


OUTSIDE_OF_BATCHES = frozenset((EPOCH_END, *range(END, len(PHASES))))
"""The phases of a rank that has left training's batches, for the end of an epoch or of the run, or an evaluation."""


class PhaseTimes:
    """How long the phases of a rank have lasted in this run."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._shown: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_SHOWN))

    def add(self, phase: int, seconds: float) -> None:
        """Adds a phase that has ended, with its longest time without progress."""
        self._shown[phase].append(seconds)

    def limit_s(self, phase: int) -> float:
        """Returns the seconds without progress that a phase is allowed.

        Three times the longest of its last 50 times, but at least ``after_s``; at least ten times ``after_s`` if it is
        slow by nature, or has not ended before: a first forward compiles.
        """
        shown = self._shown[phase]
        base = self._after_s * (times.SLOW_FACTOR if PHASES[phase].is_slow or not shown else 1)
        # The first time does not count if there are others: it includes one-time setup.
        later = [*shown][1:] if len(shown) < _NUM_SHOWN else shown
        return max(base, _SHOWN_FACTOR * max(later or shown, default=0.0))


class Mark(NamedTuple):
    """An event on a rank."""

    at_s: float  # time on the monotonic clock of its host
    number: int  # counts from 1, in the order of writing
    kind: int  # one of this module's kinds
    code: int  # index of a phase; of a bucket, 1 if it is the last one of a backward; of an exchange, its fragment
    value: int  # step of a phase, index of a bucket or batch, or number of an exchange of its fragment, from 0


class MarkWriter:
    """Writes marks, on any thread. ``fd`` of the memory is to be passed to another process, then closed."""

    def __init__(self) -> None:
        self.fd = anonymous_file("commopt-marks")
        os.ftruncate(self.fd, NUM_BYTES)
        self._memory = mmap.mmap(self.fd, NUM_BYTES)
        self._numbers = itertools.count(1)  # next() of it is atomic

    def write(self, kind: int, code: int = 0, value: int = 0) -> None:
        """Writes one mark, over the oldest."""
        number = next(self._numbers)
        _MARK.pack_into(self._memory, number % _NUM_MARKS * _MARK.size, time.monotonic(), number, kind, code, value)


def anonymous_file(name: str) -> int:
    """Returns a descriptor of a new file without a name, in memory where the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read_marks(memory: bytes | mmap.mmap) -> list[Mark]:
    """Returns the marks in memory, the oldest first; a part of one at the end is ignored."""
    whole = memory[: len(memory) // _MARK.size * _MARK.size]
    marks = [Mark(*fields) for fields in _MARK.iter_unpack(whole)]
    return sorted((mark for mark in marks if mark.kind), key=lambda mark: mark.number)
