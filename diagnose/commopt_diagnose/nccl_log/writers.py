"""Finds the process that wrote a line, also where processes that share a file have torn each other's lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from commopt_diagnose.nccl_log.facts import Process, TornLines
from commopt_diagnose.nccl_log.lines import Message

_ADDRESS = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank ")
# Containers number their processes from 1, so smaller numbers are often equal on different hosts by chance.
_MIN_UNIQUE_PID = 4096
# In logs of mpiexec about one line in 100 is torn, and a tenth of those lose their whole head. A log of which some
# lines were written without heads has more of them.
_MAX_FRAGMENTS = 3


class Writers:
    """The processes of a log.

    Process and thread numbers stand behind the host's name, so where the beginning of a line is lost, or something
    stands in front of it, only the name is damaged, as in ``nodnode-b:849778:849939``.
    """

    def __init__(self, torn: dict[str, TornLines]) -> None:
        self.processes: list[Process] = []
        self._torn = torn
        self._by_thread: dict[tuple[str | None, int | None, int | None, int | None], Process] = {}
        self._by_pid: dict[int | None, list[Process]] = {}
        self._last_in_file: dict[tuple[str, int | None], Process] = {}
        self._num_headless: Counter[Process] = Counter()  # lines of processes without a host

    def process_of(self, message: Message) -> Process:
        """Returns the process of a line; if the head is missing, the owner of its communicator or the last writer."""
        key = (message.host, message.pid, message.tid, message.device)
        process = self._by_thread.get(key) if message.host is not None else self._without_head(message)
        if process is None:
            process = self._find(message) or self._add(message.host or "", message.pid)
            if message.host is not None:
                self._by_thread[key] = process
        self._last_in_file[message.file, message.device] = process
        if not process.host:
            self._num_headless[process] += 1
        return process

    def is_fragment(self, process: Process) -> bool:
        """Returns whether a process stands for a few lines without heads, in a log whose lines have heads."""
        return 0 < self._num_headless[process] <= _MAX_FRAGMENTS and any(other.host for other in self.processes)

    def note_torn(self, message: Message) -> None:
        """Notes that processes wrote into each other's lines in this file."""
        torn = self._torn.setdefault(message.file, TornLines(first=message.line))
        torn.count += torn.last_number != message.number
        torn.last_number = message.number

    def _add(self, host: str, pid: int | None) -> Process:
        process = Process(host=host, pid=pid)
        self.processes.append(process)
        self._by_pid.setdefault(pid, []).append(process)
        return process

    def _without_head(self, message: Message) -> Process | None:
        if message.tid is not None and (process := self._with_thread(message.tid, message.device)):
            self.note_torn(message)
            return process
        match = _ADDRESS.search(message.text) if "comm 0x" in message.text else None
        owners = [process for process in self.processes if match[1] in process.by_address] if match else []
        if len(owners) == 1:
            return owners[0]
        last = self._last_in_file.get((message.file, message.device))
        if last is None and message.device is None:
            in_file = {process for (file, _), process in self._last_in_file.items() if file == message.file}
            last = in_file.pop() if len(in_file) == 1 else None
        # The first line of another process begins like this.
        begins = message.text.startswith("Bootstrap")
        is_other = begins and last is not None and not last.host and any(member.finished for member in last.members)
        return None if is_other else last

    def _find(self, message: Message) -> Process | None:
        """Returns the known process whose thread this is, or a new one under the host's true name."""
        if message.host is None:
            return None
        host, same_pid = message.host, self._by_pid.get(message.pid, [])
        if message.tid is None and (process := self._with_thread(message.pid, message.device)):
            self.note_torn(message)
            return process  # the host and the process number are cut, and this is the thread's
        if process := self._same_name(host, same_pid):
            return process
        for process in same_pid:
            if process.host and (host.endswith(process.host) or self._is_torn(message, host, process)):
                self.note_torn(message)
                if self._is_likelier_host(host, process):
                    process.host = host  # the line that named this process first was torn
                return process
        if self._is_host(host):
            return None
        for name in dict.fromkeys(process.host for process in self.processes if process.host):
            before = host.removesuffix(name)
            if before != host and (before.isdecimal() or self._begins_host(before)) and not name[0].isdecimal():
                self.note_torn(message)
                return self._same_name(name, same_pid) or self._add(name, message.pid)
        return None

    def _with_thread(self, tid: int | None, device: int | None) -> Process | None:
        if (tid or 0) < _MIN_UNIQUE_PID:
            return None
        owners = {process for key, process in self._by_thread.items() if key[2:] == (tid, device)}
        return owners.pop() if len(owners) == 1 else None

    def _is_likelier_host(self, host: str, process: Process) -> bool:
        """Returns whether a name is likelier than the one of a process: other processes have it, or one of its form."""
        others = [other.host for other in self.processes if other is not process]

        def score(name: str) -> tuple[int, int]:
            return others.count(name), list(map(_shape, others)).count(_shape(name))

        known, new = score(process.host), score(host)
        is_first = process.host.endswith(host) and len(list(self._keys(process))) == 1
        return new > known or (new == known and is_first)

    def _same_name(self, name: str, processes: list[Process]) -> Process | None:
        return next((process for process in processes if process.host == name), None)

    def _is_torn(self, message: Message, host: str, process: Process) -> bool:
        """Returns whether a host of the same process number is not another host, but what is left of the name."""
        if (message.pid or 0) < _MIN_UNIQUE_PID or _shape(host) == _shape(process.host):
            return False  # such as node9 and node10
        if process.host.endswith(host):
            return True
        if len(host) == len(process.host) or self._is_host(host):
            return False
        is_known_thread = any(key[1:] == (message.pid, message.tid, message.device) for key in self._keys(process))
        return is_known_thread and message.tid != message.pid

    def _keys(self, process: Process) -> Iterator[tuple[str | None, int | None, int | None, int | None]]:
        return (key for key, owner in self._by_thread.items() if owner is process)

    def _is_host(self, name: str) -> bool:
        return any(process.host == name for process in self.processes)

    def _begins_host(self, text: str) -> bool:
        return any(process.host.startswith(text) and process.host != text for process in self.processes)


def _shape(name: str) -> str:
    return re.sub(r"\d+", "#", name)
