"""What ranks do and meet while they train, as a log has it: choices, progress, warnings, timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_commopt.text.findings import Line


@dataclass(frozen=True, kw_only=True)
class LoggedWarning:
    """An ``NCCL WARN`` line, or an error of NCCL that PyTorch reports.

    Attributes:
        text: of the message.
        host: host of the process; "" where unknown.
        rank: that wrote it, None where unknown.
        line: where it stands.
    """

    text: str
    host: str
    rank: int | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A collective that PyTorch's watchdog gave up.

    Attributes:
        rank: that waited.
        group: process group; "" where the line does not say.
        sequence: number of the collective; None before torch 2.0.
        operation: such as ``ALLREDUCE``.
        sizes: elements in and out, as the line has them.
        waited_s: seconds.
        line: where it stands.
    """

    rank: int
    group: str
    sequence: int | None
    operation: str
    sizes: str
    waited_s: float | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a rank was when PyTorch's watchdog acted.

    Attributes:
        rank: that says so.
        group: process group; "" where the line does not say.
        enqueued: number of its last collective that was started.
        completed: of the last that ended.
        line: where it stands.
    """

    rank: int
    group: str
    enqueued: int
    completed: int
    line: Line


class Choice(NamedTuple):
    """What NCCL's tuner chose for a message.

    Attributes:
        operation: such as ``AllReduce``; "" where the line does not say.
        num_bytes: of the message.
        algorithm: such as ``RING``, ``TREE``, ``NVLS``.
        protocol: ``LL``, ``LL128`` or ``SIMPLE``; "" for kernels that have none.
        channels: as the line has them, such as ``0..7``; "" where it does not say.
    """

    operation: str
    num_bytes: int
    algorithm: str
    protocol: str
    channels: str
