"""EndedRanks: finds ranks of this host that have ended before there is a process group.

A rank that is merely slow has a process, and is never among them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_commopt.launch.environment import launching_rank
from lightning_commopt.watch import times
from lightning_commopt.watch.hangs.process import (
    children_by_process,
    find_exit,
    is_alive,
    process_fields,
    read_proc,
    signal_name,
    variables_of,
)

if TYPE_CHECKING:
    from lightning_commopt.sync.strategies import RunningStrategy

# By the class that Lightning has for it, each launcher has a name, and a variable for the number of a rank on its host.
_LAUNCHERS = {"TorchElasticEnvironment": ("torchrun", "LOCAL_RANK"), "SLURMEnvironment": ("srun", "SLURM_LOCALID")}


class EndedRanks:
    """What a rank that is about to create its process group can find out about the other ranks on its host."""

    def __init__(self, strategy: RunningStrategy, ranks_here: range) -> None:
        self._ranks_here = ranks_here
        self._children: Sequence[Any] = getattr(strategy.launcher, "children", ())
        environment = strategy.cluster_environment
        assert environment is not None
        self._local_rank = environment.local_rank()
        self._launching_rank = launching_rank(environment.main_port) if self._local_rank else None
        names = (_LAUNCHERS.get(cls.__name__) for cls in type(environment).__mro__)
        self._launcher, self._variable = next(filter(None, names), ("", ""))
        if self._variable not in os.environ:
            self._launcher = ""
        self._look_at = time.monotonic() + times.PROCESSES_LOOK_S
        self._absent_since: dict[int, float] = {}

    def find(self) -> str | None:
        """Returns which rank has ended, and how, if that can be seen; None if none has, or if that is unknown."""
        first = self._ranks_here.start
        for rank, child in enumerate(self._children, first + 1):
            if (status := child.poll()) is not None:
                return self._text(rank, _status_text(status), f"its process was {child.pid}", is_early=status == 0)
        pid = self._launching_rank
        if pid not in (None, os.getppid()) and not is_alive(pid):
            return self._text(first, "has ended", f"its process {pid} had started this rank")
        return self._find_absent() if self._launcher and time.monotonic() >= self._look_at else None

    def processes(self) -> dict[int, int]:
        """Returns the living processes of ranks on this host, by rank, as far as they can be seen."""
        first, launcher = self._ranks_here.start, _launcher_pid(self._variable) if self._launcher else None
        below = {} if launcher is None else _processes_below(launcher, self._variable) or {}
        started = {rank: child.pid for rank, child in enumerate(self._children, 1) if child.poll() is None}
        return {first + local_rank: pid for local_rank, pid in (started | below).items()}

    def _text(self, rank: int, outcome: str, process: str, *, is_early: bool = False) -> str:
        early = "Probably its program ended by sys.exit or return on this rank only; " if is_early else ""
        shown = "its output shows where" if is_early else "Its output shows why"
        return f"rank {rank} on {socket.gethostname()} {outcome} before it joined: {process}. {early}{shown}"

    def _find_absent(self) -> str | None:
        now = time.monotonic()
        self._look_at = now + times.PROCESSES_LOOK_S
        launcher = _launcher_pid(self._variable)
        present = None if launcher is None else _processes_below(launcher, self._variable)
        absent = set() if present is None else {*range(len(self._ranks_here))} - present.keys()
        self._absent_since = {rank: self._absent_since.get(rank, now) for rank in absent}
        if launcher is None or not absent or now - min(self._absent_since.values()) < times.ABSENT_S:
            return None
        rank = self._ranks_here.start + min(absent, key=lambda local_rank: (self._absent_since[local_rank], local_rank))
        process = f"{self._launcher} has no process of it any more"
        unreaped = [pid for pid in children_by_process()[launcher] if not is_alive(pid)]
        outcome = find_exit(unreaped[0]) if len(unreaped) == len(absent) == 1 else None
        if outcome is None:
            # torchrun ends the other ranks if the status is another one.
            outcome = "has ended with status 0" if self._launcher == "torchrun" else "has ended"
        return self._text(rank, outcome, process, is_early=outcome.endswith("status 0"))


def _status_text(status: int) -> str:
    return f"has ended with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def _launcher_pid(variable: str) -> int | None:
    """Returns the nearest ancestor that is not a part of this rank; None if that cannot be seen.

    A rank may be a tree of processes, such as a script of a shell that runs Python: all have its variables.
    """
    own, fields = os.environ[variable], process_fields("self")
    while fields is not None and (pid := int(fields[1])) > 0:
        try:
            if variables_of(pid).get(variable) != own:
                return pid
        except PermissionError:
            return pid if read_proc(f"{pid}/comm").strip() == "slurmstepd" else None
        except OSError:
            return None
        fields = process_fields(pid)
    return None


def _processes_below(pid: int, variable: str) -> dict[int, int] | None:
    """Returns the living descendants of a process in which a variable is a number, by that number.

    None if one of its children does not show the variable: it may be any rank, as a program can overwrite what the
    kernel shows of its environment.
    """
    children = children_by_process()
    processes: dict[int, int] = {}
    below = [*children[pid]]
    for descendant in below:  # the list grows meanwhile
        below += children[descendant]
        try:
            value = variables_of(descendant).get(variable, "")
        except PermissionError:
            return None
        except OSError:  # the process has ended meanwhile
            continue
        if value.isdecimal():
            processes.setdefault(int(value), descendant)
        elif descendant in children[pid] and is_alive(descendant):
            return None
    return processes
