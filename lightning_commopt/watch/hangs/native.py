"""What the kernel says of a process, without its help. Linux only; elsewhere nothing is known."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_WORKER_MODULE = "lightning_commopt.watch.hangs.watcher"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


@dataclass(frozen=True)
class ProcessState:
    """A process as the kernel sees it.

    Attributes:
        pid: of the process.
        state: in words, as in proc(5); "dead" also if there is no such process.
        cpu_s: seconds of CPU time that it has used.
        num_threads: that it has.
        kernel_function: that its main thread sleeps in; "" if that is not told.
        resident_bytes: of memory.
    """

    pid: int
    state: str
    cpu_s: float = 0.0
    num_threads: int = 0
    kernel_function: str = ""
    resident_bytes: int = 0


def process_state(pid: int) -> ProcessState:
    """Returns what the kernel says of a process."""
    fields = _stat(pid)
    if fields is None:
        return ProcessState(pid, "dead")
    ticks_s = os.sysconf("SC_CLK_TCK")
    return ProcessState(
        pid,
        _STATES.get(fields[0], fields[0]),
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks_s,
        num_threads=int(fields[17]),
        kernel_function=_read(_PROC / str(pid) / "wchan").strip("0\n"),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and has not ended."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def catches(pid: int, signal_number: int) -> bool:
    """Returns whether a process has a handler for a signal; otherwise sending it may end the process."""
    for line in _read(_PROC / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def descendants(pid: int) -> list[int]:
    """Returns the living processes that a process has started, and those that these have, parents first.

    The watchers of ranks are not among them.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))) is not None and fields[0] not in "ZX":
            children[int(fields[1])].append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return [each for each in found[1:] if _WORKER_MODULE not in _read(_PROC / str(each) / "cmdline")]


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of proc(5)'s stat from the third on."""
    fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
    return fields or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
