"""A backward of FSDP2 on CPU as a simulation of two threads.

The thread that computes backward gathers parameters, and waits for them. It reduces gradients itself, or hands them to
a second thread, which compresses and sends them in order. Both send over one link, and may share one processor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_commopt.cost.shared_core import core_rates, wake_s

_TINY_S = 1e-12
"""Differences below it are rounding: a step of training has 1e-4 s or more, and a double 16 digits of it."""

_MAX_UNDER_WAY = 2
"""Units that may be under way when backward continues, as in `lightning_commopt.sync.fsdp2.gradients`."""


class Piece(NamedTuple):
    """Arithmetic, or a message."""

    seconds: float  # duration if nothing slows it down
    cpu_share: float = 1.0  # share of a processor that it keeps busy meanwhile
    link_share: float = 0.0  # share of the link, in each direction, that it keeps busy; 0 for arithmetic


class Task(NamedTuple):
    """What the first thread does next: its own pieces, or what it hands to the second thread."""

    pieces: tuple[Piece, ...]
    is_handed_over: bool = False


class _Thread:
    """The pieces that a thread still has to do, one after another."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.left_s = 0.0

    def add(self, pieces: Iterable[Piece]) -> None:
        self._pieces.extend(pieces)

    @property
    def piece(self) -> Piece | None:
        return self._pieces[0] if self._pieces else None

    def begin(self, least_s: float) -> None:
        """Begins the next piece; a message takes ``least_s`` at least."""
        piece = self._pieces[0]
        self.left_s = max(piece.seconds, least_s if piece.link_share else 0.0)

    def advance(self, seconds: float) -> bool:
        """Returns whether the piece has ended, which is then removed."""
        self.left_s -= seconds
        if self.left_s > _TINY_S:
            return False
        self._pieces.popleft()
        return True


def backward_s(tasks: Sequence[Task], *, shares_core: bool = False, num_others: float = 0.0) -> float:
    """Returns how long a backward takes until both threads are done.

    Args:
        tasks: what the first thread does, in order.
        shares_core: both threads have one processor together.
        num_others: threads of other programs that want this processor, see `wake_s`.
    """
    now_s = 0.0
    waiting = deque(tasks)
    first, second = _Thread(), _Thread()
    handed_over: deque[int] = deque()  # pieces that are left of each unit under way
    while True:
        while first.piece is None and waiting and len(handed_over) <= _MAX_UNDER_WAY:
            task = waiting.popleft()
            if not task.is_handed_over:
                first.add(task.pieces)
            elif task.pieces:
                second.add(task.pieces)
                handed_over.append(len(task.pieces))
        active = [thread for thread in (first, second) if thread.piece is not None]
        if not active:
            return now_s
        is_computing = first.piece is not None and not first.piece.link_share
        for thread in active:
            if thread.left_s <= _TINY_S:
                thread.begin(wake_s(num_others, beside_backward=shares_core and is_computing and thread is second))
        rates = _rates([thread.piece for thread in active if thread.piece is not None], shares_core)
        seconds = min(thread.left_s / rate for thread, rate in zip(active, rates, strict=True))
        now_s += seconds
        for thread, rate in zip(active, rates, strict=True):
            if thread.advance(seconds * rate) and thread is second:
                handed_over[0] -= 1
                if not handed_over[0]:
                    handed_over.popleft()


def _rates(pieces: Sequence[Piece], shares_core: bool) -> list[float]:
    """Returns the rate of each piece, 1 if nothing slows it down; a link is shared as a core is."""
    on_link = core_rates([piece.link_share for piece in pieces])
    on_core = core_rates([piece.cpu_share for piece in pieces]) if shares_core else [math.inf] * len(pieces)
    return [min(1.0, link, core) for link, core in zip(on_link, on_core, strict=True)]
