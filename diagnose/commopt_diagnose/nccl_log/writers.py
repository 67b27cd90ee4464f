"""Finds the process that wrote a line, also where processes that share a file have torn each other's lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commopt_diagnose.nccl_log.facts import Process, TornLines
from commopt_diagnose.nccl_log.lines import Message

_ADDRESS = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank ")
# Containers number their processes from 1, so smaller numbers are often equal on different hosts by chance.
_MIN_UNIQUE_PID = 4096


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

    def process_of(self, message: Message) -> Process:
        """Returns the process of a line; if the head is missing, the owner of its communicator or the last writer."""
        key = (message.host, message.pid, message.tid, message.device)
        process = self._by_thread.get(key) if message.host is not None else self._without_head(message)
        if process is None:
            process = self._find(message) or self._add(message.host or "", message.pid)
            if message.host is not None:
                self._by_thread[key] = process
        self._last_in_file[message.file, message.device] = process
        return process

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
        named = _ADDRESS.search(message.text) if "comm 0x" in message.text else None
        owners = [process for process in self.processes if named[1] in process.by_address] if named else []
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
        for process in same_pid:
            if process.host == host:
                return process
        for process in same_pid:
            if process.host and (host.endswith(process.host) or self._is_torn(message, host, process)):
                self.note_torn(message)
                if process.host.endswith(host) and (self._is_host(host) or len(list(self._keys(process))) == 1):
                    process.host = host  # the first line of this process was torn, not this one
                return process
        if self._is_host(host):
            return None
        for name in dict.fromkeys(process.host for process in self.processes if process.host):
            before = host.removesuffix(name)
            if before != host and (before.isdecimal() or self._begins_host(before)) and not name[0].isdecimal():
                self.note_torn(message)
                return self._same_name(name, same_pid) or self._add(name, message.pid)
        return None

    def _same_name(self, name: str, processes: list[Process]) -> Process | None:
        return next((process for process in processes if process.host == name), None)

    def _is_torn(self, message: Message, host: str, process: Process) -> bool:
        """Returns whether a host of the same process number is not another host, but what is left of the name."""
        if (message.pid or 0) < _MIN_UNIQUE_PID or len(host) == len(process.host) or self._is_host(host):
            return False
        if _shape(host) == _shape(process.host):
            return False  # such as node9 and node10
        if process.host.endswith(host):
            return True
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
