"""FreshProcessLauncher: the Hydra launcher that runs each job of a sweep in its own processes.

Within one process a second job would find the process group and rank variables of the first one, and train with its
number of processes.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_commopt.compat.hydra import store_config
from lightning_commopt.launch.environment import RANK_VARIABLES, num_started_ranks
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.composing import (
    JobComposer,
    check_folders,
    find_changed_keys,
    find_finished_run,
    set_aside,
)
from lightning_commopt.train.sweep.config import ConfigError
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.job import Job, JobResult, run_job, save_summary
from lightning_commopt.train.sweep.resolvers import register_resolvers

_NAMESPACE = "hydra_plugins._lightning_commopt_sweep"
# Paths in a configuration may use these variables of an allocation. All others are removed, as they would make
# Lightning regard a run as a task of SLURM.
_SLURM_KEPT = ("SLURM_JOB_ID", "SLURM_TMPDIR")


class FreshProcessLauncher(Launcher):
    """Runs the jobs one after another, each as a single run in its own process group.

    With ``repeat`` all jobs run once, then all again. Of jobs that train the same, only the first runs. A job whose
    folder has a finished run of the same configuration does not run again. A job that fails is recorded, and the next
    one runs. A sweeper gets the mean of the final validation losses of a job's repetitions; NaN if one has no loss.
    """

    # Hydra accepts only plugins in its own namespace. A module there exports this class.
    __module__ = _NAMESPACE
    # Set by the program before Hydra makes the launcher: the command that starts one run, and the display.
    command: ClassVar[tuple[str, ...]]
    display: ClassVar[SweepDisplay]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._composer = JobComposer(command=self.command, context=hydra_context, sweep_config=config)
        self._first_jobs: dict[str, Job] = {}
        self._notes: set[str] = set()
        self._left_out: list[tuple[Job, Job]] = []
        self._results: dict[str, JobResult] = {}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Checks all jobs, runs them, and returns the final validation loss of each.

        Raises:
            ConfigError: this process is itself one of several ranks; a job cannot be run, or would overwrite another.
            InterruptedRun: this process received a signal to stop; its children have ended.
        """
        if "LOCAL_RANK" in os.environ or num_started_ranks() > 1:
            raise ConfigError(
                "A sweep starts its own ranks: run it without torchrun, in one process; "
                "under SLURM without srun, or with srun --ntasks=1."
            )
        try:
            import_module("lightning_commopt.report")  # the sweep ends with a report: missing packages must show now
        except ImportError as error:
            raise ConfigError(str(error)) from error
        # Hydra's own launchers begin with these two calls.
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        sweep_dir = Path(self._config.hydra.sweep.dir).resolve()
        rounds = self._composer.rounds(job_overrides, initial_job_idx)
        to_run = self._without_equals([job for jobs in rounds for job in jobs])
        check_folders(self._first_jobs.values())
        self.display.on_plan(sweep_dir, len(self._first_jobs))
        for note in dict.fromkeys(job.note for job in to_run if job.note is not None and job.note not in self._notes):
            self.display.on_note(note)
            self._notes.add(note)
        self._keep_finished(to_run, sweep_dir)
        for job in to_run:
            if job.content not in self._results:
                self._make_room(job, sweep_dir)
                self.display.on_start(job)
                self._save_result(run_job(job, _environment(), self.display), sweep_dir)
        return [
            _job_return(own, [self._results[job.content].record for job in repetitions])
            for own, repetitions in zip(job_overrides, zip(*rounds, strict=True), strict=True)
        ]

    def _without_equals(self, jobs: Sequence[Job]) -> list[Job]:
        """Returns the jobs to run: of jobs that train the same only the first, unless an earlier call has run it."""
        to_run, left_out = [], []
        for job in jobs:
            first = self._first_jobs.setdefault(job.content, job)
            if first is job:
                to_run.append(job)
            else:
                left_out.append((job, first))
        if left_out:
            pairs = ", ".join(f"{job.number} as {first.number}" for job, first in left_out)
            self.display.on_note(f"skipped, as they train the same as another job: {pairs}")
            self._left_out += left_out
        return to_run

    def _keep_finished(self, jobs: Sequence[Job], sweep_dir: Path) -> None:
        for job in jobs:
            record = find_finished_run(job)
            if record is not None:
                result = JobResult(job=job, record=record, is_kept=True)
                self.display.on_end(result)
                self._save_result(result, sweep_dir)

    def _make_room(self, job: Job, sweep_dir: Path) -> None:
        changed = find_changed_keys(job)
        moved_to = set_aside(job.folder, sweep_dir)
        if changed:
            kept = f"; the earlier run is in {moved_to}" if moved_to else ""
            self.display.on_note(f"job {job.number} runs again, as its settings changed: {', '.join(changed)}{kept}")

    def _save_result(self, result: JobResult, sweep_dir: Path) -> None:
        self._results[result.job.content] = result
        in_order = sorted(self._results.values(), key=lambda ended: ended.job.number)
        save_summary(sweep_dir, in_order, self._left_out)


def register_with_hydra(command: tuple[str, ...], display: SweepDisplay) -> None:
    """Registers our resolvers, and ``hydra/launcher=fresh_processes`` for the sweeps of this process."""
    register_resolvers()
    FreshProcessLauncher.command, FreshProcessLauncher.display = command, display
    Plugins.instance().register(FreshProcessLauncher)
    store_config(
        group="hydra/launcher", name="fresh_processes", node={"_target_": f"{_NAMESPACE}.FreshProcessLauncher"}
    )


def _environment() -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in (*RANK_VARIABLES, "PL_GLOBAL_SEED") and (name in _SLURM_KEPT or not name.startswith("SLURM_"))
    }
    # Without this a program that writes to a pipe would buffer its lines.
    return {**env, "PYTHONUNBUFFERED": "1"}


def _job_return(overrides: Sequence[str], records: Sequence[RunRecord]) -> JobReturn:
    """Returns the result of a job for the sweeper, from the records of its repetitions."""
    losses = [record.val_loss for record in records if record.status == "finished" and record.val_loss is not None]
    # Not FAILED: sweepers raise at the first such job, and the remaining ones would not run.
    returned = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    returned.return_value = statistics.fmean(losses) if len(losses) == len(records) else math.nan
    return returned
