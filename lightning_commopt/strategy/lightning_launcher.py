"""Lightning's launcher of child processes, corrected for Hydra multiruns and for ranks whose launcher has ended.

In a multirun Lightning's own launcher starts children that repeat the whole sweep. The process group and the rank
variables of one job make the next one train with the same number of processes, and Lightning's observer of the first
job's children kills the whole sweep if one of them ends with an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from lightning_commopt.launch.environment import RANK_VARIABLES, name_launcher
from lightning_commopt.launch.nccl_options import restore_process
from lightning_commopt.sync.groups import leave_process_group
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.watch.waiting import end_waiting_rank, print_now, waits_for_others

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
else:
    _SubprocessScriptLauncher = object

_LOOK_S = 0.2
"""Two looks at the processes of a job are so far apart. It is a poll of each child, beside graces of many seconds."""
_FIT_GRACE_S = 30.0
"""`FitWatch` waits so long in a multirun. Over gloo rank 0 raises when its peer has gone, and the sweep continues,
which is worth more than an early end; over NCCL rank 0 may wait for ever."""
_GRACE_S = 45.0
"""The job observer waits so long. It is longer than the watches of joining and of a fit take, whose messages show why a
rank has ended."""
_END_S = 5.0
"""Ranks that wait to join have so long from SIGTERM to SIGKILL. They have no work to save, but a busy machine."""

_launched_job: object | None = None
_variables_before_launch: dict[str, str | None] = {}


def multirun_job() -> object | None:
    """Returns an object that stands for the Hydra multirun's job that runs in this process; None outside a multirun."""
    if "hydra" not in sys.modules:  # importing it here would cost every user half a second
        return None
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return HydraConfig.instance().cfg  # each job has its own, while jobs may share a directory
    return None


def forget_previous_job() -> None:
    """Removes the process group of an earlier job of the same Hydra multirun, and the variables that it has set."""
    global _launched_job
    if _launched_job is None or multirun_job() in (None, _launched_job):
        return
    leave_process_group()
    restore_process()
    for name, value in _variables_before_launch.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _launched_job = None


class Launcher(_SubprocessScriptLauncher):
    """Starts children that know their launcher, and in a multirun run only the job of this process.

    Attributes:
        children: processes of the ranks from local rank 1 on, in order; empty if this process has started none.
        has_joined: whether these ranks have made their process group.
        grace_s: seconds that a rank may wait for one that has failed before it is ended; None for the default.
    """

    strategy: RunningStrategy
    has_joined = False
    _job_ranks: Sequence[subprocess.Popen[bytes]] = ()

    @property
    def children(self) -> Sequence[subprocess.Popen[bytes]]:
        return self._job_ranks or self.procs

    @property
    def grace_s(self) -> float | None:
        return _FIT_GRACE_S if multirun_job() is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no name in a module by which pickle could find it.
        return _new_launcher, (type(self).__bases__[1],), vars(self)

    def kill(self, signum: int) -> None:
        for child in self.children:
            child.send_signal(signum)

    def _call_children_scripts(self) -> None:
        with name_launcher(self.cluster_environment.main_port):
            if multirun_job() is None:
                super()._call_children_scripts()
                if getattr(self.strategy, "lets_ranks_fail", False):
                    # Lightning's observer of ``procs`` would end all ranks when one has failed.
                    self._job_ranks, self.procs = self.procs, []
            else:
                self._start_job()

    def _start_job(self) -> None:
        from lightning_commopt.launch.hydra_command import single_run_command  # it imports Hydra

        global _launched_job
        self._check_can_spawn_children()
        _launched_job = multirun_job()
        _variables_before_launch.update({name: os.environ.get(name) for name in RANK_VARIABLES})
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        ranks = []
        for local_rank in range(1, self.num_processes):
            command, folder = single_run_command(local_rank)
            environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
            ranks.append(subprocess.Popen(command, env=environment, cwd=folder))
        # These are not in ``procs``, because Lightning's observer of those would outlive the job and kill the sweep.
        self._job_ranks = ranks
        observe = _JobObserver(self, _launched_job).run
        threading.Thread(target=observe, name="commopt-job-observer", daemon=True).start()


class _JobObserver:
    """Ends this process if its job waits in vain for a rank that has failed; ends ranks that a job has left alone.

    Hydra catches an exception that ends a job on this rank, and starts the next job, while the other ranks of the first
    may still run. If they have a process group with this rank, they are left to end by themselves, since they may still
    save their work.
    """

    def __init__(self, launcher: Launcher, job: object) -> None:
        self._launcher, self._ranks, self._job = launcher, launcher.children, job
        self._first = launcher.cluster_environment.node_rank() * launcher.num_processes
        self._training_thread = threading.get_ident()

    def run(self) -> None:
        waits_since: float | None = None
        while multirun_job() is self._job:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            failed = next((rank for rank in self._ranks if rank.poll()), None)
            is_waiting = failed is not None and waits_for_others(
                self._training_thread, self._launcher.strategy.root_device
            )
            waits_since = (waits_since or now) if is_waiting else None
            if failed is not None and waits_since is not None and now - waits_since >= _GRACE_S:
                self._end_job(failed)
        if not self._launcher.has_joined:
            self._end_ranks()
        for rank in self._ranks:
            rank.wait()

    def _end_job(self, failed: subprocess.Popen[bytes]) -> None:
        if multirun_job() is self._job:
            for rank in self._ranks:
                rank.kill()
            name = f"Rank {self._first + 1 + self._ranks.index(failed)}"
            reason = f"{name} has ended with status {failed.returncode}, its process {failed.pid}."
            end_waiting_rank(self._first, reason, _GRACE_S)

    def _end_ranks(self) -> None:
        """Ends the ranks that wait for this rank to join them."""
        left = [rank for rank in self._ranks if rank.poll() is None]
        if left:
            print_now(
                f"[rank {self._first}] This job has ended before its process group was made. Its other ranks are ended."
            )
        for rank in left:
            rank.terminate()
        for rank in left:
            try:
                rank.wait(_END_S)
            except subprocess.TimeoutExpired:
                rank.kill()


def launcher_for(strategy: RunningStrategy) -> Any:
    """Returns the launcher for a strategy: Lightning's, or a `Launcher` in its place if it starts child processes."""
    lightnings: Any = strategy.launcher
    if not hasattr(lightnings, "_call_children_scripts"):
        return lightnings
    base: Any = type(lightnings)
    cls = _launcher_class(base)
    launcher = cls(lightnings.cluster_environment, lightnings.num_processes, lightnings.num_nodes)
    launcher.strategy = strategy
    return launcher


@cache
def _launcher_class(base: type) -> type[Launcher]:
    return type("CommOptLauncher", (Launcher, base), {})


def _new_launcher(base: type) -> Launcher:
    """Returns a launcher whose attributes pickle will set."""
    cls = _launcher_class(base)
    return cls.__new__(cls)
