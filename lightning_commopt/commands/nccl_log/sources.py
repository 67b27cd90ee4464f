"""Who wrote a line: which process, and which of its communicators the thread is busy with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lightning_commopt.commands.nccl_log.facts import Member, Process
from lightning_commopt.commands.nccl_log.lines import Message

_ADDRESS = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank ")


@dataclass(kw_only=True, eq=False)
class Source:
    """A process while its lines are read.

    A thread sets up one communicator after the other. What it writes belongs to the one that it named last. Lines of a
    thread that has named none are kept apart: `communicators` finds out whose they are, once everything is read.
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

    def named_member(
        self, message: Message, address: str, rank: int, num_ranks: int, comm_id: str | None = None
    ) -> Member:
        """Returns the member with this address: known, or the one whose first lines did not name it, or a new one.

        An address is used again once a communicator is destroyed, which a log may not have.
        """
        member, latest = self.by_address.get(address), self.find_member(message)
        is_known = member is not None and (member.rank, member.num_ranks) == (rank, num_ranks)
        if member is None or not is_known or (comm_id and member.comm_id not in (None, comm_id)):
            is_open = latest is not None and not latest.address and latest.finished is None
            if latest is None or not is_open or latest.rank not in (None, rank) or latest.min_ranks > num_ranks:
                latest = self._new_member(message)
            member = latest
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
            has_ended = last is not None and not last.process.host and any(each.finished for each in last.members)
            if last is not None and not (has_ended and message.text.startswith("Bootstrap")):
                return last  # else it is another process's first line
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
