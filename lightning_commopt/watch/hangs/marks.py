"""Marks: where a rank is, in memory that outlives it and that others read without its help.

The rank writes about a microsecond's worth for each; there is no lock. A reader may meet a mark that is just being
written: it has a number of its own, and is taken in the next time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import tempfile
import time
from typing import NamedTuple

_MARK = struct.Struct("<dQHHxxxxq")
_NUM_MARKS = 2048
NUM_BYTES = _MARK.size * _NUM_MARKS

PHASE, BUCKET_READY, BUCKET_START, COLLECTIVE_START, COLLECTIVE_END, BUCKET_END, BATCH = range(1, 8)
"""Kinds of marks. ``code`` of a phase is its index in `lightning_commopt.watch.hangs.phases.PHASES`."""


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
