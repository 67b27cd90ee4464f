"""Which ranks belong to one communicator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from lightning_commopt.commands.nccl_log.facts import Communicator, Member


def group_members(members: Sequence[Member]) -> list[Communicator]:
    """Groups members of all processes into communicators.

    NCCL names a communicator since 2.16: by its id, or by the parent that it was split from. Older and cut logs give
    the number of ranks alone: there a rank goes to the first communicator of this size that does not have it yet.

    Returns:
        In the order of their first lines; those of which nothing is known but that a line exists are left out.
    """
    groups: list[_Group] = []
    by_key: dict[Hashable, _Group] = {}
    addresses = {(id(each.process), each.address): each for each in members if each.address}
    for member in members:
        key = _key(member, addresses)
        if key is None:
            continue
        group = by_key.get(key)
        if group is None:
            group = by_key[key] = _Group(member.num_ranks)
            groups.append(group)
        group.add(member)
    for member in members:
        if _key(member, addresses) is None and _has_content(member):
            fitting = next((group for group in groups if group.can_take(member)), None)
            if fitting is None:
                fitting = _Group(member.num_ranks)
                groups.append(fitting)
            fitting.add(member)
    order = {id(member): index for index, member in enumerate(members)}
    groups.sort(key=lambda group: min(order[id(member)] for member in group.all_members))
    return [group.communicator(number) for number, group in enumerate(groups, start=1)]


class _Group:
    def __init__(self, num_ranks: int | None) -> None:
        self.num_ranks = num_ranks
        self.all_members: list[Member] = []
        self._ranks: dict[int, Member] = {}
        self._unknown: list[Member] = []

    def can_take(self, member: Member) -> bool:
        if member.rank is None:
            # A rank of its own wrote it, whichever that is: not one that is here by name.
            return all(each.process is not member.process for each in self.all_members)
        fits = member.num_ranks in (None, self.num_ranks) or self.num_ranks is None
        return fits and member.rank not in self._ranks and member.rank < (self.num_ranks or member.rank + 1)

    def add(self, member: Member) -> None:
        self.all_members.append(member)
        self.num_ranks = self.num_ranks or member.num_ranks
        if member.rank is None or member.rank in self._ranks:
            self._unknown.append(member)
        else:
            self._ranks[member.rank] = member

    def communicator(self, number: int) -> Communicator:
        return Communicator(number=number, members=dict(sorted(self._ranks.items())), unknown=self._unknown)


def _key(member: Member, addresses: dict[tuple[int, str], Member]) -> Hashable:
    """Returns what NCCL names a communicator by; None where the log does not say."""
    if member.comm_id is not None:
        return member.comm_id, member.num_ranks
    if not member.split:
        return None
    parent = addresses.get((id(member.process), member.parent))
    above = None if parent is None or parent is member else _key_of_parent(parent)
    return above, member.split, member.num_ranks


def _key_of_parent(parent: Member) -> Hashable:
    return parent.comm_id or (parent.split, parent.num_ranks)


def _has_content(member: Member) -> bool:
    return member.rank is not None or bool(member.connections or member.rings or member.notes or member.channels)
