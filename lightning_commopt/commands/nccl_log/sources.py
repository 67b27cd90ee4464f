"""Who wrote a line: which process, and for which communicator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_commopt.commands.nccl_log.facts import Member, Process
from lightning_commopt.text.findings import Line


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


_MAX_BYTES = 1 << 16  # of a line: what is longer is no line of NCCL, whose own buffer has 1024 bytes
_MAX_CHARACTERS = 4000  # so that no number is too long for int()
_SHOWN_CHARACTERS = 400
_OF_INTEREST = (b"NCCL", b"atchdog", b"enqueued")
_MARK = re.compile(r"NCCL (INFO|WARN|TRACE)\b ?")
# The end of what stands before the mark. A head has all of host:pid:tid, or host:pid and then the device.
_HEAD = re.compile(
    r"(?:(?P<host>[^\s:<>()\[\]{}]+):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) +"
    r"|(?P<host_only>[^\s:/<>()\[\]{}]+):(?P<pid_only>\d{1,10}) +(?=\[))?"
    r"(?:\[(?P<device>-?\d{1,4})\] +)?"
    r"(?:[^\s:]+\.\w+:\d+ +(?:\([^()]*\) +)?)?$"
)
_CLOCK = re.compile(r"\d{1,2}$")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x00")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message in the log.

    Attributes:
        line: where it stands.
        host: name of the host; None where the head of the line is missing.
        pid: process, likewise.
        tid: thread, likewise.
        device: CUDA device of the thread, likewise.
        level: ``INFO``, ``WARN`` or ``TRACE``; "" for a line that NCCL did not write in this form.
        text: behind the head.
        is_whole: False for the end of a file that stops in the middle of a line.
    """

    line: Line
    host: str | None = None
    pid: int | None = None
    tid: int | None = None
    device: int | None = None
    level: str = ""
    text: str
    is_whole: bool = True


def read_messages(path: Path) -> Iterator[Message]:
    """Reads the lines of a log that may be NCCL's or of PyTorch's watchdog, and leaves out all others.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(_MAX_BYTES):
            number += 1
            if any(word in raw for word in _OF_INTEREST):
                text = raw.decode("utf-8", errors="replace")
                yield from split_line(text.rstrip("\r\n"), str(path), number, is_whole=raw.endswith(b"\n"))


def split_line(text: str, file: str, number: int, *, is_whole: bool = True) -> Iterator[Message]:
    r"""Splits a line into its messages: several, where ranks wrote into one line at the same time.

    >>> [found] = split_line("[1,0]<stdout>:node-3:21:27 [2] NCCL INFO Connected all trees", "log", 1)
    >>> found.host, found.pid, found.tid, found.device, found.level, found.text
    ('node-3', 21, 27, 2, 'INFO', 'Connected all trees')
    >>> [found] = split_line(" [0] misc/socket.cc:446 NCCL WARN wrong type 3 != 4", "log", 1)
    >>> found.host, found.device, found.level, found.text
    (None, 0, 'WARN', 'wrong type 3 != 4')
    """
    text = _ESCAPES.sub("", text)
    line = Line(file=file, number=number, text=text.strip()[:_SHOWN_CHARACTERS])
    marks = list(_MARK.finditer(text))
    if not marks:
        yield Message(line=line, text=text.strip()[:_MAX_CHARACTERS], is_whole=is_whole)
        return
    heads: list[re.Match[str]] = []
    begin = 0
    for mark in marks:
        found = _HEAD.search(text[: mark.start()], max(begin, mark.start() - 300))
        assert found is not None  # all of its parts may be missing
        heads.append(found)
        begin = mark.end()
    for index, (head, mark) in enumerate(zip(heads, marks, strict=True)):
        is_last = index == len(marks) - 1
        host, pid, tid, device = _parts(head)
        end = len(text) if is_last else heads[index + 1].start()
        yield Message(
            line=line,
            host=host,
            pid=pid,
            tid=tid,
            device=device,
            level=mark[1],
            text=text[mark.end() : end].strip()[:_MAX_CHARACTERS],
            is_whole=is_whole if is_last else False,
        )


def _parts(head: re.Match[str]) -> tuple[str | None, int | None, int | None, int | None]:
    """Returns host, pid, tid and device; a time of day in front of a dropped head is none of them."""
    host = head["host"] or head["host_only"]
    pid, tid, device = head["pid"] or head["pid_only"], head["tid"], head["device"]
    if host is not None and all(part is not None and _CLOCK.match(part) for part in (host, pid, tid)):
        host = pid = tid = None
    return host, _integer(pid), _integer(tid), _integer(device)


def _integer(digits: str | None) -> int | None:
    return None if digits is None else int(digits)
