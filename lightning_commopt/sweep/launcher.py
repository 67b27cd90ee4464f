"""FreshProcessLauncher: the Hydra launcher that runs each job of a sweep in processes of its own.

Within one process a second job would find the first one's process group and rank variables, and train with the first
one's number of processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_commopt.sweep.job import Job, JobResult, SweepObserver, run_job, save_summary

_NAMESPACE = "hydra_plugins._lightning_commopt_sweep"
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
)


@dataclass
class FreshProcessesConf:
    """Options of ``hydra/launcher=fresh_processes``."""

    _target_: str = f"{_NAMESPACE}.FreshProcessLauncher"


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """What a sweep needs to know of the program that it runs.

    Attributes:
        command: starts one run; the overrides follow it.
        check: raises if a job's configuration cannot be run.
        plan_name: names the plan of a job's configuration.
        observer: is told what happens.
    """

    command: tuple[str, ...]
    check: Callable[[DictConfig], None]
    plan_name: Callable[[DictConfig], str]
    observer: SweepObserver


class FreshProcessLauncher(Launcher):
    """Runs the jobs one after another, each as a single run in a process group of its own.

    A job that fails is recorded, and the next one runs. The value that a sweeper gets for a job is its final
    validation loss, NaN where there is none.

    Attributes:
        settings: what the program sets before Hydra makes the launcher.
    """

    # Hydra makes plugins of this namespace only; a module there gives this class its name.
    __module__ = _NAMESPACE
    settings: ClassVar[SweepSettings | None] = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra hands over."""
        self._context = hydra_context
        self._config = config
        self._results: list[JobResult] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Checks all jobs, then runs them.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: number of the first one.

        Returns:
            For each job its final validation loss.

        Raises:
            HydraException: this process is itself one of several ranks.
            InterruptedRun: we were told to stop; no process is left.
        """
        assert self.settings is not None, "SweepSettings come before the launcher"
        if "LOCAL_RANK" in os.environ:
            raise HydraException("A sweep starts its own ranks: run it without torchrun, in one process.")
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        sweep_dir = Path(self._config.hydra.sweep.dir).resolve()
        jobs = [self._job(list(own), number) for number, own in enumerate(job_overrides, start=initial_job_idx)]
        returns = []
        for job in jobs:
            self.settings.observer.started(job, initial_job_idx + len(jobs))
            result = run_job(job, _environment(), self.settings.observer)
            self._results.append(result)
            save_summary(sweep_dir, self._results)
            returns.append(_job_return(result))
        return returns

    def _job(self, overrides: list[str], number: int) -> Job:
        """Composes a job's configuration, as the job will, and checks it."""
        assert self.settings is not None
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
            folder = (Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir).resolve()
            config.hydra.runtime.output_dir = str(folder)
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            run_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
            self.settings.check(run_config)
            plan_name = self.settings.plan_name(run_config)
        finally:
            HydraConfig.instance().cfg = before
        as_single_run = [
            *(override for override in self._config.hydra.overrides.hydra if not override.startswith("hydra.mode=")),
            *overrides,
            "hydra.mode=RUN",
            f"hydra.run.dir={_quoted(str(folder))}",
            f"hydra.job.num={number}",
            f"hydra.job.id='{number}'",
        ]
        command = (*self.settings.command, *as_single_run)
        return Job(number=number, plan_name=plan_name, overrides=tuple(overrides), command=command, folder=folder)


def register_launcher(settings: SweepSettings) -> None:
    """Makes ``hydra/launcher=fresh_processes`` known to Hydra.

    Args:
        settings: for the sweeps of this process.
    """
    FreshProcessLauncher.settings = settings
    Plugins.instance().register(FreshProcessLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="fresh_processes", node=FreshProcessesConf)


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    # A program that writes to a pipe would hold its lines back.
    return {**env, "PYTHONUNBUFFERED": "1"}


def _quoted(path: str) -> str:
    """Returns a path as one value of Hydra's override grammar."""
    escaped = path.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


def _job_return(result: JobResult) -> JobReturn:
    loss = result.record.val_loss
    has_value = result.record.status == "finished" and loss is not None
    # Not FAILED: sweepers raise at the first such job, and the remaining ones would not run.
    returned = JobReturn(overrides=result.job.overrides, status=JobStatus.COMPLETED)
    returned.return_value = loss if has_value else math.nan
    return returned
