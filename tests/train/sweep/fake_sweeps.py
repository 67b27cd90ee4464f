"""Sweeps of commopt-train's own configuration with jobs that train nothing and end at once."""

import sys
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.measure.runs.files import CONFIG_FILE
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.job import Job, JobResult
from lightning_commopt.train.sweep.launcher import register_with_hydra

# The loss is seed + 100 repetition. Seed 13 fails, and so does any job that asks for other than one repetition.
JOB = """
import json, sys
from pathlib import Path
values = dict(argument.split("=", 1) for argument in sys.argv[1:])
seed, repetition = int(values.get("seed", 0)), int(values.get("repetition", 0))
record = dict(status="finished", sync_method="fake", metrics={"val_loss": seed + 100.0 * repetition})
if seed == 13 or values.get("repeat", "1") != "1":
    raise ValueError("no luck")
(Path(values["hydra.run.dir"].strip('"')) / "run.json").write_text(json.dumps(record))
"""


class SweepNotes(SweepDisplay):
    """Writes down what it is told, and leaves the configuration in the name of jobs that cannot."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.num_jobs: list[int] = []
        self.notes: list[str] = []
        self.started_jobs: list[Job] = []
        self.results: list[JobResult] = []

    @property
    def numbers(self) -> list[int]:
        """Of the jobs that ran, in this order."""
        return [job.number for job in self.started_jobs]

    def on_plan(self, folder: Path, num_jobs: int) -> None:
        self.num_jobs.append(num_jobs)

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_start(self, job: Job) -> None:
        self.started_jobs.append(job)
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / CONFIG_FILE).write_text(job.config_yaml)

    def on_end(self, result: JobResult) -> None:
        self.results.append(result)


def fake_sweep(folder: Path, *overrides: str) -> tuple[list[float], SweepNotes]:
    """Runs a sweep in this process; gives what the sweeper got for each job, and what the display was told."""
    notes = SweepNotes()
    register_with_hydra((sys.executable, "-S", "-c", JOB), notes)
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("commopt-train", create_config_search_path(f"file://{conf_dir()}"))
    quiet = ("hydra/hydra_logging=none", "hydra/job_logging=none")
    try:
        batches = hydra.multirun(
            "train",
            lambda config: None,
            [*overrides, f"hydra.sweep.dir={folder}", *quiet],
            with_log_configuration=False,
        )
    finally:  # else later tests of this process would find themselves in a job of Hydra's
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    return [returned.return_value for batch in batches for returned in batch], notes
