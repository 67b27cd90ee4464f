"""A CUDA device as the host sees it: streams, memory, and what was launched after what.

Nothing is computed. Every stream has a vector clock: of each stream, how many launches have surely ended when its own
next launch begins. With these clocks three faults show that a device has only at times: launches that race for memory,
memory that the allocator gives away while another stream still uses it, and collectives of several communicators that
may run in another order on another rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MAIN = "main"
NCCL = "nccl "
"""Beginning of the names of NCCL's streams, one for each communicator."""
_PACKAGE = "lightning_commopt/"
_GOES_THROUGH_NESTED = "sync/gather.py"

Clock = Counter[str]
"""Launches of each stream that have ended."""


@dataclass(frozen=True)
class Launch:
    """Something that a stream does.

    Attributes:
        stream: which one.
        name: of the operation.
        num_bytes: that it reads and writes.
        after: the launches of each stream that end before it begins; of its own stream, with this one.
    """

    stream: str
    name: str
    num_bytes: int
    after: Clock


@dataclass
class _Block:
    """Memory from the pool of the stream in which it was allocated."""

    alive: StorageWeakRef
    pool: str
    where: str
    last_use: dict[str, tuple[int, str]] = field(default_factory=dict)
    last_write: tuple[str, int, str] | None = None
    recorded: set[str] = field(default_factory=set)


class Machine:
    """One device and the host thread that gives it work.

    Args:
        without: a place from `waits` that is left out, to see whether that is found.

    Attributes:
        findings: faults, each with the lines that have to do with it.
        host_waits: where the host waited for the device.
        waits: places in this package that order streams or keep memory for them.
        launches: all of them, in the host's order.
        priorities: of the streams that were made.
    """

    def __init__(self, without: str | None = None) -> None:
        self.findings: dict[str, None] = {}
        self.host_waits: list[str] = []
        self.waits: set[str] = set()
        self.launches: list[Launch] = []
        self.priorities: dict[str, int] = {}
        self._without = without
        self._clocks: dict[str, Clock] = {}
        self._host = Clock()
        self._current = [MAIN]
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []

    @property
    def current(self) -> str:
        """The current stream."""
        return self._current[-1]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Makes a stream the current one."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def now(self, stream: str) -> Clock:
        """Returns an event: all that was launched in a stream so far, and what that came after."""
        return Clock(self._clocks.get(stream, {}))

    def wait(self, stream: str, event: Clock) -> None:
        """Makes a stream wait for an event."""
        if self._counts():
            self.order(stream, event)

    def order(self, stream: str, event: Clock) -> None:
        """Makes a stream wait for an event by itself, as libraries do: that cannot be left out."""
        clock = self._clocks.setdefault(stream, Clock())
        clock |= event

    def wait_on_host(self, *streams: str) -> None:
        """Makes the host wait for streams; for all of them if none is named."""
        self.host_waits.append(_where())
        for stream in streams or tuple(self._clocks):
            self._host |= self._clocks.get(stream, Clock())

    def record(self, tensor: Tensor, stream: str) -> None:
        """Keeps a tensor's memory until a stream has done what was launched when it is freed."""
        if self._counts():
            self._block(tensor).recorded.add(stream)

    def allocate(self, values: Iterable[Any]) -> None:
        """Notes new memory, from the pool of the current stream."""
        for tensor in _on_device(values):
            self._block(tensor)

    def launch(
        self,
        name: str,
        reads: Iterable[Any],
        writes: Iterable[Any],
        stream: str | None = None,
        num_bytes: int | None = None,
    ) -> None:
        """Launches an operation.

        Args:
            name: of the operation.
            reads: tensors; what else there is among them does not count.
            writes: tensors.
            stream: None for the current one.
            num_bytes: that it moves; None for all of the tensors once.
        """
        stream = self.current if stream is None else stream
        reads, writes = _on_device(reads), _on_device(writes)
        blocks = [(self._block(tensor), False) for tensor in reads] + [(self._block(tensor), True) for tensor in writes]
        clock = self._clocks.setdefault(stream, Clock())
        clock |= self._host
        if stream.startswith(NCCL):
            self._check_order(stream)
        clock[stream] += 1
        for block, is_write in blocks:
            self._use(block, stream, is_write)
        if num_bytes is None:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*reads, *writes))
        self.launches.append(Launch(stream, name, num_bytes, Clock(clock)))

    def _counts(self) -> bool:
        """Notes where a wait is; returns whether it is to be left out."""
        place = _where(depth=2, besides=_GOES_THROUGH_NESTED)
        if place:  # else it is the test that waits, in place of torch
            self.waits.add(place)
        return not place or place != self._without

    def _check_order(self, stream: str) -> None:
        """Checks that a collective comes after all earlier ones of other communicators.

        Source: NCCL's user guide, "Using multiple NCCL communicators concurrently".
        """
        for other, clock in self._clocks.items():
            if other.startswith(NCCL) and self._clocks[stream][other] < clock[other]:
                self._find(f"collectives of {stream!r} at [{_where()}] and of {other!r} are in no order")

    def _use(self, block: _Block, stream: str, is_write: bool) -> None:
        clock, here = self._clocks[stream], _where()
        verb = "writes" if is_write else "reads"
        if block.last_write is not None:
            by, number, there = block.last_write
            if clock[by] < number:
                self._find(f"{stream!r} {verb} at [{here}] what {by!r} may not have written yet at [{there}]")
        if is_write:
            for by, (number, there) in block.last_use.items():
                if clock[by] < number:
                    self._find(f"{stream!r} writes at [{here}] what {by!r} may still use at [{there}]")
            block.last_write = stream, clock[stream], here
        block.last_use[stream] = clock[stream], here

    def _block(self, tensor: Tensor) -> _Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None or block.alive.expired():
            self._note_freed()
            self._check_pool(self.current)
            block = _Block(StorageWeakRef(storage), self.current, _where())
            self._blocks[storage._cdata] = block
        return block

    def _note_freed(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.alive.expired()]:
            self._freed.append(self._blocks.pop(key))

    def _check_pool(self, pool: str) -> None:
        """Checks that what is freed in a pool may be given away now, in whatever order the allocator does that."""
        clock = self._clocks.setdefault(pool, Clock())
        clock |= self._host
        for block in [block for block in self._freed if block.pool == pool]:
            self._freed.remove(block)
            for stream, (number, there) in block.last_use.items():
                if stream != pool and stream not in block.recorded and clock[stream] < number:
                    self._find(
                        f"memory of {pool!r} from [{block.where}] is used again at [{_where()}] while {stream!r} may"
                        f" still use it at [{there}]"
                    )

    def _find(self, text: str) -> None:
        self.findings[text] = None


def _on_device(values: Iterable[Any]) -> Sequence[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.is_cuda]


def _where(depth: int = 3, besides: str = "") -> str:
    """Returns the innermost lines of this package that led here, ``besides`` those of a file; perhaps nothing."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < depth:
        _, is_ours, file = frame.f_code.co_filename.rpartition(_PACKAGE)
        line = f"{file}:{frame.f_lineno}"
        if is_ours and file != besides and line not in lines[-1:]:
            lines.append(line)
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)
