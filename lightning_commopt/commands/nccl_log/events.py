"""What ranks do and meet while they train, as a log has it: calls, choices, progress, warnings, timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.text.findings import Line


@dataclass(frozen=True, kw_only=True)
class LoggedWarning:
    """An ``NCCL WARN`` line, or an error of NCCL that PyTorch reports."""

    text: str
    place: str = ""  # file and line of NCCL
    host: str
    rank: int | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A collective that PyTorch's watchdog gave up."""

    rank: int
    group: str  # "" where the line does not say
    sequence: int | None  # None before torch 2.0
    operation: str  # such as ALLREDUCE
    sizes: str  # elements in and out, as the line has them
    limit_s: float | None
    waited_s: float | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a rank was when PyTorch's watchdog acted."""

    rank: int
    group: str  # "" where the line does not say
    work: int | None  # number of the collective that failed
    enqueued: int  # number of its last collective that was started
    completed: int
    line: Line


@dataclass(kw_only=True)
class RasReport:
    """A part of the report: what is wrong with a communicator, or with the job."""

    comm_id: str  # "" for the job
    status: str
    line: Line
    details: list[str] = field(default_factory=list)


class Choice(NamedTuple):
    """What NCCL's tuner chose for a message."""

    operation: str  # "" where the line does not say
    num_bytes: int
    algorithm: str  # such as RING, TREE, NVLS
    protocol: str  # LL, LL128 or SIMPLE; "" for kernels that have none
    channels: str  # as the line has them, such as 0..7; "" where it does not say
