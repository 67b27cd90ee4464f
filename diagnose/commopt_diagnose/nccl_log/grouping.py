"""Groups the members of all processes into communicators, and adds processes and ranks that name none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from commopt_diagnose.nccl_log.communicators import Communicator, NcclLog
from commopt_diagnose.nccl_log.facts import Member, Process
from lightning_commopt.text.formatting import grouped


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
    by_key: dict[Hashable, list[Member]] = {}
    sized: dict[int, list[Member]] = {}
    for member in members:
        if (key := keys[member]) is not None:
            by_key.setdefault(key, []).append(member)
        elif member.num_ranks is not None and (member.address or not _absorb(of_process, keys, member)):
            sized.setdefault(member.num_ranks, []).append(member)
    unsized = [m for m in members if keys[m] is None and m.num_ranks is None]
    lost = [member for member in unsized if not _absorb(of_process, keys, member)]
    lost = [m for m in lost if m.rank is not None or m.connections or m.channels or m.searches or m.nvlinks]
    communicators = [_communicator(group) for group in by_key.values()]
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
        unnamed = [process for process in log.rest().processes if process.host and process.network is not None]
        if len(unnamed) <= len(only.missing) - len(only.unknown):
            only.unknown += [Member(process=process) for process in unnamed]


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
        first = lines.connected
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
    unplaced = []
    places = [_OpenPlaces(c) for c in communicators if c.count == 1 and c.missing] if group else []
    for member in group:
        fitting = list(itertools.islice((open_ones for open_ones in places if open_ones.fit(member)), 2))
        if len(fitting) != 1 or (member.rank is None and member.num_ranks is not None):
            unplaced.append(member)
        else:
            fitting[0].add(member)
    return unplaced


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
