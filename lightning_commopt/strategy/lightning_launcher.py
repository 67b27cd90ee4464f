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

_POLL_S = 0.2
"""Interval between two polls of a job's processes. It is small compared with the grace periods below."""
_FIT_GRACE_S = 30.0
"""Time that `FitWatch` gives a waiting rank in a multirun before it ends its process. On rank 0 that ends the sweep.
Over gloo rank 0 raises by itself once its peer is gone, and the sweep continues, which is worth the wait; over NCCL
rank 0 may wait for ever."""
_GRACE_S = 45.0
"""Time that the job observer gives a waiting rank. It must exceed `_FIT_GRACE_S` and the times of `JoinWatch`, so that
these come first: their messages show why a rank has ended."""
_TERMINATE_GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL for ranks that wait to join. They have no work to save, but the machine may be busy."""

_launched_job: object | None = None
_variables_before_launch: dict[str, str | None] = {}


def multirun_job() -> object | None:
    """Returns an object that identifies the Hydra multirun job in this process; None outside of a multirun."""
    if "hydra" not in sys.modules:  # importing it here would cost every user half a second
        return None
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return HydraConfig.instance().cfg  # each job has a config of its own, whereas jobs may share a directory
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
    """Starts child processes that know their launcher; in a Hydra multirun they run only the job of this process.

    Attributes:
        children: processes of the ranks from local rank 1 on, in order; empty if this process has started none.
        has_joined: whether these ranks have made their process group.
        grace_s: seconds that a rank may wait for a failed one before the watch ends it; None for the watch's default.
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
        # `_launcher_class` creates the class at run time, so pickle cannot find it by name.
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
    """Ends this process if its job waits for a rank that has failed, and ends ranks that a job has left behind.

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
            time.sleep(_POLL_S)
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
            for process in self._ranks:
                process.kill()
            rank = self._first + 1 + self._ranks.index(failed)
            reason = f"Rank {rank} (process {failed.pid}) has ended with status {failed.returncode}."
            end_waiting_rank(self._first, reason, _GRACE_S)

    def _end_ranks(self) -> None:
        """Ends the ranks that wait for this rank to join them."""
        waiting = [rank for rank in self._ranks if rank.poll() is None]
        if waiting:
            print_now(
                f"[rank {self._first}] This job has ended before its process group was created, so its other ranks are"
                " terminated."
            )
        for rank in waiting:
            rank.terminate()
        for rank in waiting:
            try:
                rank.wait(_TERMINATE_GRACE_S)
            except subprocess.TimeoutExpired:
                rank.kill()


def launcher_for(strategy: RunningStrategy) -> Any:
    """Returns Lightning's launcher of a strategy, or a `Launcher` in its place if it starts child processes."""
    original: Any = strategy.launcher
    if not hasattr(original, "_call_children_scripts"):
        return original
    base: Any = type(original)
    cls = _launcher_class(base)
    launcher = cls(original.cluster_environment, original.num_processes, original.num_nodes)
    launcher.strategy = strategy
    return launcher


@cache
def _launcher_class(base: type) -> type[Launcher]:
    return type("CommOptLauncher", (Launcher, base), {})


def _new_launcher(base: type) -> Launcher:
    """Returns a launcher without attributes, which pickle sets next."""
    cls = _launcher_class(base)
    return cls.__new__(cls)
