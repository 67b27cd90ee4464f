"""Lightning's launcher of child processes, corrected for Hydra multiruns.

In a multirun Lightning's own launcher starts children that repeat the whole sweep, and what the first job leaves
behind (process group, rank variables) makes the next one train with the first one's number of processes.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lightning_commopt.launch.environment import RANK_VARIABLES
from lightning_commopt.launch.hydra_command import single_run_command
from lightning_commopt.sync.groups import leave_process_group

if TYPE_CHECKING:
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
else:
    _SubprocessScriptLauncher = object

_launched_job_dir: str | None = None
_variables_before_launch: dict[str, str | None] = {}


def multirun_job_dir() -> str | None:
    """Returns the directory of the Hydra multirun's job that runs in this process; None outside a multirun."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return str(HydraConfig.get().runtime.output_dir)
    return None


def forget_previous_job() -> None:
    """Removes the process group and rank variables that an earlier job of the same Hydra multirun left behind.

    What the variables were before that job is restored.
    """
    global _launched_job_dir
    if _launched_job_dir is None or multirun_job_dir() in (None, _launched_job_dir):
        return
    leave_process_group()
    for name, value in _variables_before_launch.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _launched_job_dir = None


class _MultirunLauncher(_SubprocessScriptLauncher):
    """Starts each child as a single run of the job that this process is at, in the job's directory."""

    def _call_children_scripts(self) -> None:
        global _launched_job_dir
        self._check_can_spawn_children()
        _launched_job_dir = multirun_job_dir()
        _variables_before_launch.update({name: os.environ.get(name) for name in RANK_VARIABLES})
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, folder = single_run_command(local_rank)
            environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
            self.procs.append(subprocess.Popen(command, env=environment, cwd=folder))


def configure_multirun_launcher(strategy: Any) -> None:
    """Gives a strategy the launcher for the job of a Hydra multirun, if it runs in one and starts its own processes."""
    launcher = strategy.launcher  # of the strategy's own package; None where somebody else starts the processes
    if launcher is None or strategy._start_method != "popen":
        return
    if multirun_job_dir() is not None:
        launcher_class = type("MultirunLauncher", (_MultirunLauncher, type(launcher)), {})
        strategy._launcher = launcher_class(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
