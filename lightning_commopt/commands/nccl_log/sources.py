"""Who wrote a line: which process, and for which communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_commopt.commands.nccl_log.facts import Member, Process
from lightning_commopt.commands.nccl_log.lines import Message


@dataclass(kw_only=True, eq=False)
class Source:
    """A process while its lines are read: to which communicator the next line of a thread belongs.

    Attributes:
        process: what it said.
        members: of communicators, in the order of their first lines.
        by_address: those that are not destroyed, by the communicator's address.
        by_thread: whom a thread named last.
    """

    process: Process
    members: list[Member] = field(default_factory=list)
    by_address: dict[str, Member] = field(default_factory=dict)
    by_thread: dict[int, Member] = field(default_factory=dict)

    def find_member(self, message: Message, *, ends: tuple[int, ...] = ()) -> Member | None:
        """Returns whom a line is about, if it does not name the communicator; None if there is nobody.

        That is the last one of the thread; connections come from other threads too, so else the last of the device
        that has one of the ranks ``ends``.
        """
        current = None if message.tid is None else self.by_thread.get(message.tid)
        candidates = [] if current is None or current.ended is not None else [current]
        candidates += [each for each in reversed(self.members) if each.device in (None, message.device)]
        for each in candidates:
            fits = each.rank is None or each.rank in ends
            if not ends or (fits and all(end < (each.num_ranks or end + 1) for end in ends)):
                return each
        return None

    def member(self, message: Message, *, ends: tuple[int, ...] = ()) -> Member:
        """Returns whom a line is about, a new one if there is nobody."""
        found = self.find_member(message, ends=ends)
        if found is None:
            found = self._new_member(message)
            if message.tid is not None:
                self.by_thread[message.tid] = found
        return found

    def named_member(
        self, message: Message, address: str, rank: int, num_ranks: int, comm_id: str | None = None
    ) -> Member:
        """Returns the member with this address: known, or the one whose first lines did not name it, or a new one.

        An address is used again once a communicator is destroyed, which a log may not have.
        """
        member = self.by_address.get(address)
        if member is not None and (member.rank, member.num_ranks) != (rank, num_ranks):
            member = None
        if member is not None and comm_id is not None and member.comm_id not in (None, comm_id):
            member = None
        if member is None:
            latest = self.find_member(message)
            is_unnamed = latest is not None and not latest.address and latest.rank in (None, rank)
            member = latest if latest is not None and is_unnamed else self._new_member(message)
        member.address, member.rank, member.num_ranks = address, rank, num_ranks
        self.by_address[address] = member
        if message.tid is not None:
            self.by_thread[message.tid] = member
        return member

    def _new_member(self, message: Message) -> Member:
        member = Member(process=self.process, device=message.device)
        self.members.append(member)
        return member


class Sources:
    """All processes that wrote into the files."""

    def __init__(self) -> None:
        self._sources: dict[tuple[object, ...], Source] = {}
        self._last_in_file: dict[tuple[str, int | None], Source] = {}

    def find(self, message: Message) -> Source:
        """Returns the process of a line; one without a head is by whoever wrote last into the file, on its device."""
        place = (message.line.file, message.device)
        if message.host is None:
            if place in self._last_in_file:
                return self._last_in_file[place]
            key: tuple[object, ...] = place
            host = ""
        else:
            host = self._known_host(message.host, message.pid)
            key = (host, message.pid)
        if key not in self._sources:
            self._sources[key] = Source(process=Process(host=host, pid=message.pid))
        if message.host is not None:
            self._last_in_file[place] = self._sources[key]
        return self._sources[key]

    def _known_host(self, host: str, pid: int | None) -> str:
        """Returns a known host where another rank's broken line stands in front of its name, such as ``12node-a``."""
        if (host, pid) in self._sources:
            return host
        for other, other_pid in self._sources:
            if isinstance(other, str) and host.endswith(other) and other and not other[0].isdecimal():
                before = host[: -len(other)]
                if before.isdecimal() or (before and other_pid == pid):
                    return other
        return host

    def processes(self) -> list[Process]:
        """Returns the processes that said something, with their addresses."""
        said = [
            each.process
            for each in self._sources.values()
            if each.members or each.process.settings or each.process.bootstrap
        ]
        _complete_addresses(said)
        return said

    def members(self) -> list[Member]:
        return [member for source in self._sources.values() for member in source.members]


def _complete_addresses(processes: Sequence[Process]) -> None:
    """Gives processes of a log that was cut the address of their host, where it has only one."""
    known: dict[str, set[str]] = {}
    for process in processes:
        process.address = "" if process.bootstrap is None else process.bootstrap.value.partition(":")[2]
        known.setdefault(process.host, set()).update({process.address} - {""})
    for process in processes:
        if not process.address and len(known[process.host]) == 1:
            process.address = next(iter(known[process.host]))
