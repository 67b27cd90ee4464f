"""Communicators, and everything else that was read from a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from commopt_diagnose.nccl_log.complaints import LoggedWarning, Progress, RasReport, Timeout
from commopt_diagnose.nccl_log.facts import Choice, Connection, Fact, Machine, Member, Process, TornLines
from commopt_diagnose.nccl_log.inspector import Inspected, Matched
from lightning_commopt.text.findings import Line
from lightning_commopt.text.formatting import grouped, ranks_text


@dataclass(kw_only=True, eq=False)
class Communicator:
    """The ranks of a communicator."""

    number: int  # counted from 1 in the order of the log; 0 for processes that name no communicator
    members: dict[int, Member] = field(default_factory=dict)  # the members whose rank is known, by rank
    unknown: list[Member] = field(default_factory=list)  # members whose rank or communicator is unknown
    # The number of communicators of the same size that the log does not distinguish, and that this object stands for.
    # Only before NCCL 2.16 it may be above 1.
    count: int = 1

    @property
    def all_members(self) -> list[Member]:
        return [*self.members.values(), *self.unknown]

    @property
    def num_ranks(self) -> int | None:
        return next((member.num_ranks for member in self.all_members if member.num_ranks is not None), None)

    @property
    def min_ranks(self) -> int:
        """The number of ranks that it has at least."""
        return max(
            [self.num_ranks or 1, *(member.min_ranks for member in self.all_members), *(r + 1 for r in self.members)]
        )

    @cached_property
    def num_nodes(self) -> int | None:
        """The number of nodes that NCCL sees; None if no line has it and not all ranks are known."""
        reported = next((member.num_nodes for member in self.all_members if member.num_nodes is not None), None)
        are_known = reported is None and self.is_complete and all(machine.host for machine in self.machines)
        return len(self.machines) if are_known else reported

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
        return grouped((member.process.machine, rank) for rank, member in sorted(self.members.items()))

    @property
    def spans_hosts(self) -> bool | None:
        """Whether there are several hosts; None if unknown."""
        if self.num_nodes is not None:
            return self.num_nodes > 1
        hosts = {member.process.host for member in self.all_members if member.process.host}
        if len(hosts) > 1 or any(connection.is_between_hosts for connection in self.connections):
            return True
        return False if self.num_ranks == 1 else None

    @cached_property
    def connections(self) -> list[Connection]:
        return [connection for member in self.all_members for connection in member.connections.values()]

    @property
    def processes(self) -> list[Process]:
        return list(dict.fromkeys(member.process for member in self.all_members))


@dataclass(kw_only=True)
class NcclLog:
    """Everything that was read from the files."""

    files: list[str] = field(default_factory=list)
    num_lines: int = 0  # number of lines from NCCL
    silent_files: list[str] = field(default_factory=list)  # files without a line from NCCL
    damaged_files: dict[str, str] = field(default_factory=dict)  # damaged compressed files, with the error
    torn: dict[str, TornLines] = field(default_factory=dict)  # files in which processes cut each other's lines
    left_out: dict[str, TornLines] = field(default_factory=dict)  # files from which Ray left out lines of other ranks
    versions: dict[str, Fact] = field(default_factory=dict)  # versions in lines that no process wrote
    packages: dict[str, Fact] = field(default_factory=dict)  # NCCL's Python packages; the job may load another NCCL
    listed: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)  # nccl-tests' host, pid, device, bus id
    lone_tests: dict[tuple[str, int], Line] = field(default_factory=dict)  # host and pid of each rank 0 of nccl-tests
    processes: list[Process] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)  # each text of a rank once
    known_warnings: dict[tuple[object, ...], LoggedWarning] = field(default_factory=dict)
    timeouts: dict[tuple[object, ...], Timeout] = field(default_factory=dict)  # each once, as PyTorch repeats them
    failed_ranks: set[int] = field(default_factory=set)  # ranks with an error of PyTorch that is no whole timeout
    progress: dict[tuple[int, str], Progress] = field(default_factory=dict)  # the last line of each rank and group
    ras: list[RasReport] = field(default_factory=list)
    choices: Counter[Choice] = field(default_factory=Counter)
    num_choices_left_out: int = 0  # lines of the tuner that are not among the choices, as there are too many
    choice_lines: dict[Choice, Line] = field(default_factory=dict)  # the first line with each choice
    inspected: Inspected = field(default_factory=Inspected)
    matched: list[Matched] = field(default_factory=list)  # the Inspector's records that match a run's steps

    def may_lack_lines(self, file: str) -> bool:
        """Returns whether a rank may have written more into a file than it shows."""
        return file in self.torn or file in self.left_out

    def warn(self, text: str, line: Line, *, rank: int | None = None, host: str = "", place: str = "") -> None:
        """Adds a warning, or counts it if its rank has written it before."""
        warning = LoggedWarning(text=text, place=place, host=host, rank=rank, line=line)
        known = self.known_warnings.setdefault((text, place, host, rank), warning)
        if known is warning:
            self.warnings.append(warning)
        else:
            known.times += 1

    def rest(self) -> Communicator:
        """Processes that name no communicator."""
        known = {member.process for communicator in self.communicators for member in communicator.all_members}
        processes = [process for process in self.processes if process not in known]
        return Communicator(number=0, unknown=[Member(process=process) for process in processes])


def ranks_of(members: Iterable[Member]) -> str:
    """Returns the ranks of members, as text."""
    known = {member.rank for member in members if member.rank is not None}
    return ranks_text(known) if known else "a rank"
