"""Who wrote a line: which process, and which of its communicators the thread is busy with.

And once all lines are read, which ranks belong to one communicator, and whose the lines are that name none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_commopt.commands.nccl_log.facts import Communicator, Member, NcclLog, Process
from lightning_commopt.commands.nccl_log.lines import Message
from lightning_commopt.text.formatting import grouped

_ADDRESS = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank ")


@dataclass(kw_only=True, eq=False)
class Source:
    """A process while its lines are read.

    A thread sets up one communicator after the other. What it writes belongs to the one that it named last. Lines of a
    thread that has named none are kept apart: `group_members` finds out whose they are, once everything is read.
    """

    process: Process
    members: list[Member] = field(default_factory=list)  # and threads that named none, in the order of first lines
    by_address: dict[str, Member] = field(default_factory=dict)  # those that are not destroyed
    by_thread: dict[tuple[int | None, int | None], Member] = field(default_factory=dict)  # whom it named last

    def find_member(self, message: Message) -> Member | None:
        """Returns whom a line's thread named last; None if it wrote nothing of a communicator yet."""
        found = self.by_thread.get(message.thread)
        return None if found is not None and found.ended is not None else found

    def member(self, message: Message, *, begins: bool = False, rank: int | None = None) -> Member:
        """Returns whom a line is about: a new one if its thread has none, or if the line begins a communicator."""
        found = self.find_member(message)
        if found is not None and begins and found.finished is not None:
            found = None
        if found is not None and rank is not None and found.rank not in (None, rank):
            # One that the same thread sets up beside the last one, or of a log that names no threads
            fitting = (each for each in reversed(self.members) if each.rank == rank and each.device == message.device)
            found = next((each for each in fitting if each.finished is None and each.ended is None), None)
        if found is None:
            found = self._new_member(message)
        if rank is not None:
            found.rank = rank
        return found

    def named_member(self, message: Message, address: str, rank: int, num_ranks: int, comm_id: str | None) -> Member:
        """Returns the member with this address: known, or the one whose first lines did not name it, or a new one.

        An address is used again once a communicator is destroyed, which a log may not have.
        """
        member = self.by_address.get(address)
        is_known = member is not None and (member.rank, member.num_ranks) == (rank, num_ranks)
        if member is None or not is_known or (comm_id and member.comm_id not in (None, comm_id)):
            member = self.find_member(message)
            is_open = member is not None and not member.address and member.finished is None
            if member is None or not is_open or member.rank not in (None, rank) or member.min_ranks > num_ranks:
                member = self._new_member(message)
        member.address, member.rank, member.num_ranks = address, rank, num_ranks
        self.by_address[address] = self.by_thread[message.thread] = member
        return member

    def _new_member(self, message: Message) -> Member:
        member = Member(process=self.process, device=message.device, file=message.file)
        self.members.append(member)
        self.by_thread[message.thread] = member
        return member


class Sources:
    """All processes that wrote into the files."""

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], Source] = {}
        self._last_in_file: dict[tuple[str, int | None], Source] = {}
        self._num_headless = 0

    def find(self, message: Message) -> Source:
        """Returns the process of a line; one without a head is by who has its communicator, else who wrote last."""
        place = (message.file, message.device)
        key: tuple[object, ...] = (message.host, message.pid)
        host = message.host or ""
        if message.host is None:
            named = _ADDRESS.search(message.text) if "comm 0x" in message.text else None
            owners = [each for each in self._sources.values() if named[1] in each.by_address] if named else []
            last = owners[0] if len(owners) == 1 else self._last_in_file.get(place)
            begins = message.text.startswith("Bootstrap")  # as the first line of another process does
            if last and not (begins and not last.process.host and any(each.finished for each in last.members)):
                return last
            self._num_headless += 1
            key = (*place, self._num_headless)
        elif key not in self._sources:
            host = self._known_host(host, message.pid)
            key = (host, message.pid)
        if key not in self._sources:
            self._sources[key] = Source(process=Process(host=host, pid=message.pid))
        self._last_in_file[place] = self._sources[key]
        return self._sources[key]

    def _known_host(self, host: str, pid: int | None) -> str:
        """Returns a known host where another rank's broken line stands in front of its name, such as ``12node-a``."""
        for other, other_pid, *_ in self._sources:
            if isinstance(other, str) and host.endswith(other) and other and not other[0].isdecimal():
                before = host[: -len(other)]
                if before.isdecimal() or (before and other_pid == pid):
                    return other
        return host

    def processes(self) -> list[Process]:
        """Returns the processes that wrote anything about themselves or a rank, with their addresses.

        In a log that was cut, that is the address of their host, where it has only one.
        """
        found = []
        known: dict[str, set[str]] = {}
        for source in self._sources.values():
            p = source.process
            if source.members or any((p.settings, p.bootstrap, p.network, p.notes, p.gdr, p.failed_at)):
                found.append(p)
                p.address = "" if p.bootstrap is None else p.bootstrap.value.partition(":")[2]
                known.setdefault(p.host, set()).update({p.address} - {""})
        for p in found:
            if not p.address and len(known[p.host]) == 1:
                (p.address,) = known[p.host]
        return found

    def members(self) -> list[Member]:
        return [member for source in self._sources.values() for member in source.members]


def group_members(members: Sequence[Member]) -> list[Communicator]:
    """Groups members of all processes into communicators.

    NCCL names a communicator since 2.16: by its id, or by the parent that it was split from. Older and cut logs give
    the number of ranks alone. Where processes have each the same rank in all communicators of this size, these are
    told apart by their order. Where not, it is unknown which ranks belong together. Those of which nothing is known but
    that a line exists are left out.
    """
    addresses = {(each.process, each.address): each for each in members if each.address}
    keys = {each: _key(each, addresses) for each in members}
    of_process = grouped((each.process, each) for each in members)
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
    found = [_communicator(group) for group in named.values()]
    for size, group in sized.items():
        found += _by_size(size, _join_open(found, group))
    found += _by_size(None, _join_open(found, lost))
    order = {member: index for index, member in enumerate(members)}
    found.sort(key=lambda each: min(order[member] for member in each.all_members))
    for number, communicator in enumerate(found, start=1):
        communicator.number = number
    return found


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
    """Adds processes that name no rank to the only communicator there is, if it lacks as many."""
    if len(log.communicators) == 1 and log.communicators[0].count == 1:
        (only,) = log.communicators
        left = [each for each in log.rest().processes if each.host and each.network is not None]
        if len(left) <= len(only.missing) - len(only.unknown):
            only.unknown += [Member(process=process) for process in left]


def _key(member: Member, addresses: Mapping[tuple[Process, str], Member]) -> Hashable:
    """Returns what NCCL names a communicator by; None if unknown."""
    if member.comm_id is not None:
        return member.comm_id, member.num_ranks
    if not member.split:
        return None
    parent = addresses.get((member.process, member.parent))
    above = None if parent is None or parent is member else parent.comm_id or (parent.split, parent.num_ranks)
    return above, member.split, member.num_ranks


def _absorb(of_process: Mapping[Process, Sequence[Member]], keys: Mapping[Member, Hashable], lines: Member) -> bool:
    """Gives lines of a thread that named no communicator to the one they can be of, if there is only one.

    Since NCCL 2.22 ranks connect when they first communicate, by another thread, and that soon follows the start of a
    communicator: there it is the last that fits. Before, several that fit are too many.
    """
    if lines.address:
        return False
    fitting = [m for m in of_process[lines.process] if m is not lines and m.address and _fits(m, lines)]
    if len(fitting) > 1 and all(keys[each] is not None for each in fitting):
        first = min((each.line.number for each in lines.connections.values()), default=None)
        begun = [each for each in fitting if first and each.finished and each.finished.number < first]
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
        and all(member.is_gpu(each.labels[each.direction == "receive"]) for each in lines.connections.values())
    )


def _communicator(members: Sequence[Member]) -> Communicator:
    known: dict[int, Member] = {}
    unknown = [each for each in members if each.rank is None or known.setdefault(each.rank, each) is not each]
    return Communicator(number=0, members=dict(sorted(known.items())), unknown=unknown)


def _join_open(found: Sequence[Communicator], group: Sequence[Member]) -> list[Member]:
    """Adds members to the one communicator that lacks them, and returns the others."""
    left = []
    incomplete = [each for each in found if each.count == 1 and each.missing] if group else []
    for member in group:
        open_ones = [
            each
            for each in incomplete
            if member.num_ranks in (None, each.num_ranks)
            and member.min_ranks <= (each.num_ranks or 0)
            and (member.rank in each.missing if member.rank is not None else len(each.missing) > len(each.unknown))
            and member.owner not in [other.owner for other in each.all_members]
        ]
        if len(open_ones) != 1 or (member.rank is None and member.num_ranks is not None):
            left.append(member)
        elif member.rank is None:
            open_ones[0].unknown.append(member)
        else:
            open_ones[0].members = dict(sorted([*open_ones[0].members.items(), (member.rank, member)]))
    return left


def _by_size(size: int | None, members: Sequence[Member]) -> list[Communicator]:
    """Returns communicators of one size without ids, or one object for all that cannot be told apart."""
    rounds = [[member] for member in members] if size == 1 else _rounds(members)
    # Without a size, unless every rank has a line of each, their order says nothing.
    if rounds is not None and (size is not None or len(set(map(len, rounds))) < 2):
        return [_communicator(each) for each in rounds]
    by_file = grouped((each.file, each) for each in members)
    found, rest = [], []
    for group in by_file.values():
        rounds = _rounds(group) if len(by_file) > 1 else None
        if rounds is not None and all(len(each) == size for each in rounds):
            found += [_communicator(each) for each in rounds]
        else:
            rest += group
    if found and rest:
        return [*found, *_by_size(size, rest)]
    times = Counter(member.rank for member in rest if member.rank is not None)
    return found or [Communicator(number=0, unknown=rest, count=max([2, *times.values()]))]


def _rounds(members: Sequence[Member]) -> list[list[Member]] | None:
    """Returns members by communicator, where each rank is always the same GPU of the same process; else None."""
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
