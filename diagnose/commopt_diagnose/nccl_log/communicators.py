"""Finds out, once all lines are read, which ranks make up each communicator, and whose lines name none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from commopt_diagnose.nccl_log.facts import (
    Choice,
    Connection,
    Fact,
    LoggedWarning,
    Machine,
    Member,
    Process,
    Progress,
    RasReport,
    Timeout,
    TornLines,
)
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
        named = next((member.num_nodes for member in self.all_members if member.num_nodes is not None), None)
        are_known = named is None and self.is_complete and all(machine.host for machine in self.machines)
        return len(self.machines) if are_known else named

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
    versions: dict[str, Fact] = field(default_factory=dict)  # versions in lines that no process wrote
    packages: dict[str, Fact] = field(default_factory=dict)  # NCCL's Python packages; the job may load another NCCL
    listed: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)  # nccl-tests' host, pid, device, bus id
    processes: list[Process] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)  # each text of a rank once
    known_warnings: dict[tuple[object, ...], LoggedWarning] = field(default_factory=dict)
    timeouts: dict[tuple[object, ...], Timeout] = field(default_factory=dict)  # each once, as PyTorch repeats them
    failed_ranks: set[int] = field(default_factory=set)  # ranks with an error of PyTorch that is no whole timeout
    progress: dict[tuple[int, str], Progress] = field(default_factory=dict)  # the last line of each rank and group
    ras: list[RasReport] = field(default_factory=list)
    choices: Counter[Choice] = field(default_factory=Counter)
    choice_lines: dict[Choice, Line] = field(default_factory=dict)  # the first line with each choice
    inspected: Inspected = field(default_factory=Inspected)
    matched: list[Matched] = field(default_factory=list)  # the Inspector's records that match a run's steps

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


def group_members(members: Sequence[Member]) -> list[Communicator]:
    """Groups members of all processes into communicators.

    Since 2.16 NCCL identifies a communicator by an id, or by the parent that it was split from. Older and cut logs give
    only the number of ranks. If every process has the same rank in all communicators of a size, their order
    distinguishes them. Otherwise it is unknown which ranks belong together. A member is left out if nothing is known of
    it but that a line exists.
    """
    addresses = {(member.process, member.address): member for member in members if member.address}
    keys = {member: _key(member, addresses) for member in members}
    of_process = grouped((member.process, member) for member in members)
    named: dict[Hashable, list[Member]] = {}
    sized: dict[int, list[Member]] = {}
    for member in members:
        if (key := keys[member]) is not None:
            named.setdefault(key, []).append(member)
        elif member.num_ranks is not None and (member.address or not _absorb(of_process, keys, member)):
            sized.setdefault(member.num_ranks, []).append(member)
    unsized = [m for m in members if keys[m] is None and m.num_ranks is None]
    unsized = [m for m in unsized if m.rank is not None or m.connections or m.channels or m.searches or m.nvlinks]
    lost = [member for member in unsized if not _absorb(of_process, keys, member)]
    communicators = [_communicator(group) for group in named.values()]
    for size, group in sized.items():
        communicators += _by_size(size, _join_open(communicators, group))
    communicators += _by_size(None, _join_open(communicators, lost))
    order = {member: index for index, member in enumerate(members)}
    communicators.sort(key=lambda communicator: min(order[member] for member in communicator.all_members))
    for number, communicator in enumerate(communicators, start=1):
        communicator.number = number
    return communicators


def add_listed(log: NcclLog) -> None:
    """Adds ranks that only nccl-tests names, in its list of devices, to the communicator that agrees with the list."""
    listed = log.listed
    by_pid = {(process.host, process.pid): process for process in log.processes}
    for communicator in log.communicators if listed else ():
        agrees = all(
            rank in listed and (m.process.pid, m.device) == listed[rank][1:3]
            for rank, m in communicator.members.items()
        )
        if communicator.count > 1 or not communicator.members or not agrees or communicator.min_ranks > max(listed) + 1:
            continue
        for rank, (host, pid, device, bus_id) in listed.items():
            if rank not in communicator.members and (communicator.num_ranks or rank + 1) > rank:
                process = by_pid.get((host, pid)) or Process(host=host, pid=pid)
                communicator.members[rank] = Member(process=process, device=device, rank=rank, bus_id=bus_id)
                communicator.members[rank].num_ranks = communicator.num_ranks


def add_unnamed(log: NcclLog) -> None:
    """Adds processes that name no rank to the only communicator there is, if enough of its ranks are missing."""
    if len(log.communicators) == 1 and log.communicators[0].count == 1:
        (only,) = log.communicators
        left = [process for process in log.rest().processes if process.host and process.network is not None]
        if len(left) <= len(only.missing) - len(only.unknown):
            only.unknown += [Member(process=process) for process in left]


def _key(member: Member, addresses: Mapping[tuple[Process, str], Member]) -> Hashable:
    """Returns what identifies a member's communicator in the log; None if unknown."""
    if member.comm_id is not None:
        return member.comm_id, member.num_ranks
    if not member.split:
        return None
    parent = addresses.get((member.process, member.parent))
    above = None if parent is None or parent is member else parent.comm_id or (parent.split, parent.num_ranks)
    return above, member.split, member.num_ranks


def _absorb(of_process: Mapping[Process, Sequence[Member]], keys: Mapping[Member, Hashable], lines: Member) -> bool:
    """Gives lines of a thread that named no communicator to the only member that they fit, if there is just one.

    Since NCCL 2.22 another thread connects the ranks when they first communicate, soon after a communicator has
    started. So if several members fit, the lines go to the last one that has started before them. In older logs they go
    to none.
    """
    if lines.address:
        return False
    fitting = [m for m in of_process[lines.process] if m is not lines and m.address and _fits(m, lines)]
    if len(fitting) > 1 and all(keys[member] is not None for member in fitting):
        first = min((connection.line.number for connection in lines.connections.values()), default=None)
        begun = [member for member in fitting if first and member.finished and member.finished.number < first]
        fitting = begun[-1:] or fitting
    if len(fitting) != 1:
        return False
    fitting[0].absorb(lines)
    return True


def _fits(member: Member, lines: Member) -> bool:
    is_set_up = bool(member.rings or member.has_trees) and bool(lines.rings or lines.has_trees)
    return (
        not is_set_up
        and lines.device in (None, member.device)
        and lines.rank in (None, member.rank)
        and lines.num_ranks in (None, member.num_ranks)
        and lines.min_ranks <= (member.num_ranks or lines.min_ranks)
        and all(member.is_gpu(c.labels[c.direction == "receive"]) for c in lines.connections.values())
    )


def _communicator(members: Sequence[Member]) -> Communicator:
    known: dict[int, Member] = {}
    unknown = [m for m in members if m.rank is None or known.setdefault(m.rank, m) is not m]
    return Communicator(number=0, members=dict(sorted(known.items())), unknown=unknown)


def _join_open(communicators: Sequence[Communicator], group: Sequence[Member]) -> list[Member]:
    """Adds members to the one communicator that lacks them, and returns the others."""
    left = []
    places = [_OpenPlaces(c) for c in communicators if c.count == 1 and c.missing] if group else []
    for member in group:
        fitting = list(itertools.islice((open_ones for open_ones in places if open_ones.fit(member)), 2))
        if len(fitting) != 1 or (member.rank is None and member.num_ranks is not None):
            left.append(member)
        else:
            fitting[0].add(member)
    return left


class _OpenPlaces:
    """The ranks that a communicator lacks. A log may have thousands of communicators, so they are kept."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.num_ranks = communicator.num_ranks or 0
        self.missing = set(communicator.missing)
        self.owners = {member.owner for member in communicator.all_members}

    def fit(self, member: Member) -> bool:
        """Returns whether a member can have one of them."""
        if member.num_ranks not in (None, self.num_ranks) or member.min_ranks > self.num_ranks:
            return False
        if member.rank is None and len(self.missing) <= len(self.communicator.unknown):
            return False
        return (member.rank is None or member.rank in self.missing) and member.owner not in self.owners

    def add(self, member: Member) -> None:
        """Gives a member its place."""
        self.owners.add(member.owner)
        if member.rank is None:
            self.communicator.unknown.append(member)
        else:
            self.missing.discard(member.rank)
            members = [*self.communicator.members.items(), (member.rank, member)]
            self.communicator.members = dict(sorted(members))


def _by_size(size: int | None, members: Sequence[Member]) -> list[Communicator]:
    """Returns communicators of one size without ids, or one object for all that cannot be distinguished."""
    rounds = [[member] for member in members] if size == 1 else _rounds(members)
    # If the size is unknown, their order identifies communicators only if every rank has a line of each.
    if rounds is not None and (size is not None or len(set(map(len, rounds))) < 2):
        return [_communicator(group) for group in rounds]
    by_file = grouped((member.file, member) for member in members)
    communicators, rest = [], []
    for of_file in by_file.values():
        rounds = _rounds(of_file) if len(by_file) > 1 else None
        if rounds is not None and all(len(group) == size for group in rounds):
            communicators += [_communicator(group) for group in rounds]
        else:
            rest += of_file
    if communicators and rest:
        return [*communicators, *_by_size(size, rest)]
    times = Counter(member.rank for member in rest if member.rank is not None)
    return communicators or [Communicator(number=0, unknown=rest, count=max([2, *times.values()]))]


def _rounds(members: Sequence[Member]) -> list[list[Member]] | None:
    """Returns members by communicator if each rank is always the same GPU of the same process; else None."""
    owners: dict[int, object] = {}
    ranks: dict[object, int | None] = {}
    times: Counter[object] = Counter()
    rounds: list[list[Member]] = []
    for member in members:
        owner, rank = member.owner, member.rank
        if (rank is not None and owners.setdefault(rank, owner) != owner) or ranks.setdefault(owner, rank) != rank:
            return None
        rounds += [[]] if times[owner] == len(rounds) else []
        rounds[times[owner]].append(member)
        times[owner] += 1
    return rounds
