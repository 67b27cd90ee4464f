"""A job as its log has it: communicators, and what processes meet while they train."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from lightning_commopt.commands.nccl_log.events import Choice, LoggedWarning, Progress, Timeout
from lightning_commopt.commands.nccl_log.facts import Connection, Fact, Machine, Member, Process
from lightning_commopt.commands.nccl_log.inspector import Inspected
from lightning_commopt.text.findings import Line


@dataclass(kw_only=True, eq=False)
class Communicator:
    """The ranks of a communicator."""

    number: int  # in the order of the log, from 1; 0 for processes that name no communicator
    members: dict[int, Member] = field(default_factory=dict)  # by rank
    unknown: list[Member] = field(default_factory=list)  # the log does not say their rank, or their communicator
    count: int = 1  # communicators of one size that the log does not tell apart; more than 1 before NCCL 2.16

    @property
    def all_members(self) -> list[Member]:
        return [*self.members.values(), *self.unknown]

    @property
    def num_ranks(self) -> int | None:
        return next((each.num_ranks for each in self.all_members if each.num_ranks is not None), None)

    @property
    def min_ranks(self) -> int:
        """Ranks that it has at least."""
        return max(
            [self.num_ranks or 1, *(each.min_ranks for each in self.all_members), *(r + 1 for r in self.members)]
        )

    @cached_property
    def num_nodes(self) -> int | None:
        """Nodes that NCCL sees; None where no line says so and not all ranks are there."""
        named = next((each.num_nodes for each in self.all_members if each.num_nodes is not None), None)
        return (
            len(self.machines) if named is None and self.is_complete and all(m.host for m in self.machines) else named
        )

    @property
    def is_complete(self) -> bool:
        """Whether each of its ranks is known."""
        return self.num_ranks is not None and len(self.members) == self.num_ranks and self.count == 1

    @property
    def missing(self) -> list[int]:
        """Ranks that wrote nothing."""
        return sorted(set(range(self.num_ranks or 0)) - set(self.members))

    @property
    def machines(self) -> dict[Machine, list[int]]:
        found: dict[Machine, list[int]] = {}
        for rank, member in sorted(self.members.items()):
            found.setdefault(member.process.machine, []).append(rank)
        return found

    @cached_property
    def connections(self) -> list[Connection]:
        return [each for member in self.all_members for each in member.connections.values()]

    @property
    def rings(self) -> dict[int, tuple[int, ...]]:
        """Order of ranks by channel."""
        return {channel: ring for member in self.all_members for channel, ring in sorted(member.rings.items())}


@dataclass(kw_only=True)
class NcclLog:
    """All that the files say."""

    files: list[str] = field(default_factory=list)
    num_lines: int = 0  # of NCCL
    silent_files: list[str] = field(default_factory=list)  # without a line of NCCL
    versions: dict[str, Fact] = field(default_factory=dict)  # that lines without a process name
    packages: dict[str, Fact] = field(default_factory=dict)  # of Python; the job may load another NCCL
    listed: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)  # by nccl-tests: host, pid, device, bus
    processes: list[Process] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)
    timeouts: dict[tuple[object, ...], Timeout] = field(default_factory=dict)  # each once: PyTorch repeats them
    progress: dict[tuple[int, str], Progress] = field(default_factory=dict)  # the last of each rank and group
    choices: Counter[Choice] = field(default_factory=Counter)
    choice_lines: dict[Choice, Line] = field(default_factory=dict)  # the first
    inspected: Inspected = field(default_factory=Inspected)
