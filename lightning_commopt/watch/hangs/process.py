"""State, end and CPU time of a process, without its help. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.transport import RankLink

_PROC = Path("/proc")
_WATCHER_MODULE = "lightning_commopt.watch.hangs.watcher"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
_EXIT_CODE = 49
"""Index of the exit code among the fields of a process: number 52 of proc(5), which counts from 1, after the two that
`process_fields` leaves out."""

_COMPUTING_SHARE = 0.1
"""Minimum share of a core for a thread to count as computing. A waiting thread uses none; a computing one may wait most
of the time for data, or for a core that it shares with others."""


@dataclass(frozen=True)
class ProcessState:
    """The state of a process in the kernel."""

    state: str  # the words of proc(5); "dead" also if there is no such process
    cpu_s: float = 0.0  # seconds of CPU time so far
    num_threads: int = 0  # number of its threads
    kernel_function: str = ""  # the function that its main thread sleeps in; "" if unknown
    resident_bytes: int = 0  # resident memory

    def __str__(self) -> str:
        """All of it in words."""
        kernel = f" in {self.kernel_function}" if self.kernel_function else ""
        return (
            f"{self.state}{kernel}, {self.cpu_s:.1f} s of CPU time, {self.num_threads} threads,"
            f" {self.resident_bytes / 2**20:.0f} MiB"
        )


def process_state(pid: int) -> ProcessState:
    """Returns the state of a process in the kernel."""
    fields = process_fields(pid)
    if fields is None:
        return ProcessState("dead")
    return ProcessState(
        _STATES.get(fields[0], fields[0]),
        cpu_s=_cpu_s(fields),
        num_threads=int(fields[17]),
        kernel_function=read_proc(f"{pid}/wchan").strip("0\n"),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def thread_cpu_s(pid: int, thread: int) -> float:
    """Returns the seconds of CPU time of a thread of a process; 0 if it has ended."""
    fields = process_fields(f"{pid}/task/{thread}")
    return 0.0 if fields is None else _cpu_s(fields)


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and has not ended."""
    fields = process_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def find_exit(pid: int) -> str | None:
    """Returns how a process has ended, or is about to, in words; None if it runs, or its parent has reaped it."""
    fields = process_fields(pid)
    if fields is None or len(fields) <= _EXIT_CODE:
        return None
    status = int(fields[_EXIT_CODE])
    if number := status & 0x7F:
        return f"was killed by {signal_name(number)}"
    return f"exited with status {status >> 8}" if status or fields[0] in "ZX" else None


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"; "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def catches(pid: int, signal_number: int) -> bool:
    """Returns whether a process has a handler for a signal; otherwise sending it may end the process."""
    for line in read_proc(f"{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def descendants(pid: int) -> list[int]:
    """Returns the living descendants of a process, parents first.

    Watchers are left out, and so are other ranks, which Lightning's launcher starts from rank 0. A watcher shows them.
    """
    children = children_by_process()
    family = [pid]
    for parent in family:  # the list grows meanwhile
        started = [child for child in children[parent] if is_alive(child) and not _is_watcher(child)]
        family += [child for child in started if not any(map(_is_watcher, children[child]))]
    return family[1:]


def children_by_process() -> dict[int, list[int]]:
    """Returns the children of every process of this host, those included that nobody has waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdecimal() and (fields := process_fields(entry.name)) is not None:
            children[int(fields[1])].append(int(entry.name))
    return children


def variables_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process was started with; an OSError if it has ended or is another user's."""
    text = (_PROC / f"{pid}/environ").read_bytes().decode("utf-8", "replace")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def _is_watcher(pid: int) -> bool:
    return _WATCHER_MODULE in read_proc(f"{pid}/cmdline")


def end_rank(pid: int, link: RankLink, orderly_s: float) -> None:
    """Asks a rank's process to end itself with a nonzero status, kills it after a while, and its descendants."""
    children = descendants(pid)
    link.send(abort=True)
    deadline = time.monotonic() + orderly_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(times.PROCESS_POLL_S)
    for process in (pid, *children):
        try:
            os.kill(process, signal.SIGKILL)
        except OSError:
            continue


def process_fields(path: object) -> list[str] | None:
    """Returns the fields of proc(5)'s stat from the third on, for "PID" or "PID/task/TID"; None if there is none."""
    return read_proc(f"{path}/stat").rpartition(")")[2].split() or None


def _cpu_s(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_proc(path: str) -> str:
    """Returns the text of a file below ``/proc``; empty if there is none, or it cannot be read."""
    try:
        return (_PROC / path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_asleep(pid: int, thread: int) -> bool:
    """Returns whether a thread sleeps in the kernel, and continues to."""
    before = _turns(pid, thread)
    time.sleep(times.QUIET_S)
    return before == _turns(pid, thread) and before[0] == "S"


def _turns(pid: int, thread: int) -> tuple[str, str]:
    """Returns a thread's state, and how long and how often it has run."""
    path = f"{pid}/task/{thread}"
    return (process_fields(path) or ["X"])[0], read_proc(f"{path}/schedstat")


class ComputingProbe:
    """Samples the CPU time of a thread, which has a number in the kernel, while it makes no other progress.

    The samples suffice for `is_computing` once there was no progress for ``after_s`` seconds.
    """

    def __init__(self, pid: int, thread: int, after_s: float) -> None:
        self._pid, self._thread = pid, thread
        self._window_s = min(times.COMPUTING_WINDOW_S, after_s / 4)
        self._samples: list[tuple[float, float]] = []

    def sample(self, idle_s: float, *, with_children: bool) -> None:
        """Takes a sample if it is time for one; with the CPU time of children if these compute for the process."""
        now = time.monotonic()
        if idle_s < self._window_s:
            self._samples.clear()
        elif not self._samples or now - self._samples[-1][0] >= self._window_s / 4:
            used_s = thread_cpu_s(self._pid, self._thread)
            if with_children:
                used_s += sum(process_state(pid).cpu_s for pid in descendants(self._pid))
            recent = [sample for sample in self._samples if now - sample[0] < 2 * self._window_s]
            self._samples = [*recent, (now, used_s)]

    def is_computing(self) -> bool:
        """Returns whether at least a tenth of a core was used in the last seconds; a waiting thread uses none."""
        if len(self._samples) < 2:
            return False
        (begin, before_s), (end, after_s) = self._samples[0], self._samples[-1]
        return after_s - before_s >= _COMPUTING_SHARE * (end - begin)
