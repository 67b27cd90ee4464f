"""What NCCL, its RAS and PyTorch complain of in a log: warnings, timeouts, and how far ranks came."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from lightning_commopt.text.findings import Line


@dataclass(kw_only=True)
class LoggedWarning:
    """An ``NCCL WARN`` line, or an error of NCCL that PyTorch reports."""

    text: str
    place: str = ""  # file and line in NCCL's source
    host: str
    rank: int | None
    line: Line  # the first with this text
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A collective that PyTorch's watchdog gave up."""

    rank_in_job: int | None  # None before torch 2.3, and where the line lacks PyTorch's prefix
    rank_in_group: int
    group: str  # "" if unknown
    sequence: int | None  # None before torch 2.0
    operation: str  # such as ALLREDUCE
    sizes: str  # elements in and out, as in the line
    limit_s: float | None
    waited_s: float | None
    line: Line

    @property
    def rank(self) -> int:
        return self.rank_in_group if self.rank_in_job is None else self.rank_in_job

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks that the sizes of a gather or a scatter prove; None for other operations.

        A gather of a list of tensors may give the size of one tensor twice, which proves nothing.
        """
        sizes = dict(part.split("=") for part in self.sizes.split(", ") if part.startswith("Numel"))
        numbers = [int(sizes.get(name, "0")) for name in ("NumelIn", "NumelOut")]
        small, large = sorted(numbers)
        is_known = re.search("ALL_?GATHER|REDUCE_?SCATTER", self.operation) and 0 < small < large and large % small == 0
        return large // small if is_known else None

    @property
    def call(self) -> str:
        """The operation with its number and sizes, which are the same on all ranks where these match."""
        number = "" if self.sequence is None else f" {self.sequence}"
        return f"{self.operation}{number}{f' ({self.sizes})' if self.sizes else ''}"


class Progress(NamedTuple):
    """How far a rank was when PyTorch's watchdog acted."""

    rank: int
    group: str  # "" if unknown
    work: int | None  # number of the collective that failed
    enqueued: int  # number of its last collective that was started
    line: Line


class RasReport(NamedTuple):
    """A part of a report by NCCL's RAS: what is wrong with a communicator, or with the job."""

    comm_id: str  # "" for the job
    status: str
    line: Line
    details: list[str]
