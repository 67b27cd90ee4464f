"""Which ranks belong to one communicator, and whose the lines are that name none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from lightning_commopt.commands.nccl_log.facts import Communicator, Member, Process


def group_members(members: Sequence[Member]) -> list[Communicator]:
    """Groups members of all processes into communicators.

    NCCL names a communicator since 2.16: by its id, or by the parent that it was split from. Older and cut logs give
    the number of ranks alone. Where processes have each the same rank in all communicators of this size, these are
    told apart by their order. Where not, the log does not say which ranks belong together, and neither do we. Those of
    which nothing is known but that a line exists are left out.
    """
    addresses = {(id(each.process), each.address): each for each in members if each.address}
    keys = {id(each): _key(each, addresses) for each in members}
    named: dict[Hashable, list[Member]] = {}
    sized: dict[int, list[Member]] = {}
    for member in members:
        if (key := keys[id(member)]) is not None:
            named.setdefault(key, []).append(member)
        elif member.num_ranks is not None and (member.address or not _absorb(members, keys, member)):
            sized.setdefault(member.num_ranks, []).append(member)
    unsized = [m for m in members if keys[id(m)] is None and m.num_ranks is None]
    unsized = [m for m in unsized if m.rank is not None or m.connections or m.channels or m.searches or m.nvlinks]
    lost = [member for member in unsized if not _absorb(members, keys, member)]
    found = [_communicator(group) for group in named.values()]
    for size, group in sized.items():
        found += _by_size(size, _join_open(found, group))
    found += _by_size(None, _join_open(found, lost))
    order = {id(member): index for index, member in enumerate(members)}
    found.sort(key=lambda each: min(order[id(member)] for member in each.all_members))
    for number, communicator in enumerate(found, start=1):
        communicator.number = number
    return found


def add_listed(
    communicators: Sequence[Communicator],
    processes: Sequence[Process],
    listed: Mapping[int, tuple[str, int, int, str]],
) -> None:
    """Adds ranks that only nccl-tests names, in its list of devices, to the communicator that agrees with the list."""
    by_pid = {(process.host, process.pid): process for process in processes}
    for communicator in communicators:
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


def add_unnamed(communicators: Sequence[Communicator], processes: Sequence[Process]) -> None:
    """Adds processes that name no rank to the only communicator there is, if it lacks as many."""
    if len(communicators) == 1 and communicators[0].count == 1:
        known = {id(member.process) for member in communicators[0].all_members}
        left = [each for each in processes if id(each) not in known and each.host and each.network is not None]
        if 0 < len(left) <= len(communicators[0].missing) - len(communicators[0].unknown):
            communicators[0].unknown += [Member(process=process) for process in left]


def _key(member: Member, addresses: dict[tuple[int, str], Member]) -> Hashable:
    """Returns what NCCL names a communicator by; None where the log does not say."""
    if member.comm_id is not None:
        return member.comm_id, member.num_ranks
    if not member.split:
        return None
    parent = addresses.get((id(member.process), member.parent))
    above = None if parent is None or parent is member else parent.comm_id or (parent.split, parent.num_ranks)
    return above, member.split, member.num_ranks


def _absorb(members: Sequence[Member], keys: Mapping[int, Hashable], lines: Member) -> bool:
    """Gives lines of a thread that named no communicator to the one they can be of, if there is only one.

    Since NCCL 2.22 ranks connect when they first communicate, by another thread, and that soon follows the start of a
    communicator: there it is the last that fits. Before, several that fit are too many.
    """
    if lines.address:
        return False
    fitting = [each for each in members if each is not lines and each.address and _fits(each, lines)]
    if len(fitting) > 1 and all(keys[id(each)] is not None for each in fitting):
        first = min((each.line.number for each in lines.connections.values()), default=None)
        begun = [each for each in fitting if first and each.finished and each.finished.number < first]
        fitting = begun[-1:] or fitting
    if len(fitting) != 1:
        return False
    fitting[0].absorb(lines)
    return True


def _fits(member: Member, lines: Member) -> bool:
    if member.process is not lines.process or lines.device not in (None, member.device):
        return False
    is_set_up = bool(member.rings or member.has_trees) and bool(lines.rings or lines.has_trees)
    if is_set_up or lines.rank not in (None, member.rank) or lines.min_ranks > (member.num_ranks or lines.min_ranks):
        return False
    return lines.num_ranks in (None, member.num_ranks) and all(
        member.is_gpu(each.labels[each.direction == "receive"]) for each in lines.connections.values()
    )


def _communicator(members: Sequence[Member]) -> Communicator:
    known: dict[int, Member] = {}
    unknown = [each for each in members if each.rank is None or known.setdefault(each.rank, each) is not each]
    return Communicator(number=0, members=dict(sorted(known.items())), unknown=unknown)


def _join_open(found: Sequence[Communicator], group: Sequence[Member]) -> list[Member]:
    """Adds members to the one communicator that lacks them, and returns the others."""
    left = []
    for member in group:
        open_ones = [
            each
            for each in found
            if each.count == 1
            and member.num_ranks in (None, each.num_ranks)
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
    if rounds is not None and size is None and len(set(map(len, rounds))) > 1:
        rounds = None  # not every rank has a line of each, so their order says nothing
    if rounds is not None:
        return [_communicator(each) for each in rounds]
    by_file: dict[str, list[Member]] = {}
    for member in members:
        by_file.setdefault(member.file, []).append(member)
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
