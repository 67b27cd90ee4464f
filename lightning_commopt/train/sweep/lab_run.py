"""Runs the ranks of one run on hosts of the network lab, each in its own process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from lightning_commopt.launch.environment import LAB_RANK_VARIABLE
from lightning_commopt.launch.hydra_command import single_run_command
from lightning_commopt.launch.lab import NetLab, RankError
from lightning_commopt.launch.process import InterruptedRun, raise_signals
from lightning_commopt.measure.runs.files import RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord, fail_record
from lightning_commopt.train.sweep.config import LabShape, lab_shape, start_record
from lightning_commopt.train.sweep.job import final_lines, last_exception

_LINES_IN_MESSAGE = 40  # a screenful: a traceback, and some lines before it


class RankFailed(CompactHydraException):
    """A rank in the lab failed; Hydra prints the message, with that rank's last lines, without a traceback."""


def train_in_lab(config: DictConfig, folder: Path) -> RunRecord:
    """Runs this Hydra job in the lab: every rank is this program with the job's own overrides; see `run_in_lab`."""
    command, original_folder = single_run_command("${oc.env:RANK}")
    os.chdir(original_folder)  # the ranks start in this process's folder
    return run_in_lab(command, config.link, lab_shape(config), start_record(config, folder), folder)


def run_in_lab(command: Sequence[str], link: str, shape: LabShape, unfinished: RunRecord, folder: Path) -> RunRecord:
    """Runs a command as every rank of a run, each pinned to one core, and forwards rank 0's output.

    A rank finds its number and peers in its environment. Rank 0 records the run, and its record is returned. If the run
    ends before it has a record, ``unfinished`` is written with the reason.

    Raises:
        RankFailed: a rank failed. All processes have ended, and the record has the reason.
        InterruptedRun: this process received a signal to stop. All processes have ended, and the record has the reason.
    """
    (folder / RUN_FILE).unlink(missing_ok=True)
    environment = {LAB_RANK_VARIABLE: "1", "PYTHONUNBUFFERED": "1"}
    if sys.stdout.isatty():
        environment["COLUMNS"] = str(shutil.get_terminal_size().columns)  # ranks write to a pipe, which has no width
    try:
        with raise_signals(), NetLab(shape.num_hosts, link) as lab:
            lab.run(
                command,
                ranks_per_host=shape.ranks_per_host,
                environment=environment,
                pin_to_cores=True,
                on_output=_show_first_rank,
            )
    except RankError as error:
        lines = final_lines(error.outputs[error.rank])
        outcome = f"rank {error.rank} ended with status {error.status}"
        exception = last_exception(lines)
        reason = f"{outcome}: {exception}" if exception else outcome
        fail_record(folder, reason, unfinished=unfinished, is_final=error.rank != 0)  # rank 0 records its own error
        shown = "\n".join([f"{outcome}; its last lines:", *(f"  {line}" for line in lines[-_LINES_IN_MESSAGE:])])
        raise RankFailed(f"{outcome}; its output is above" if error.rank == 0 else shown) from None
    except InterruptedRun as error:
        fail_record(folder, str(error), unfinished=unfinished, is_final=True)
        raise
    return RunRecord.load(folder)


def _show_first_rank(rank: int, output: bytes) -> None:
    if rank != 0:
        return
    sys.stdout.flush()
    remaining = memoryview(output)
    # The bytes bypass sys.stdout, as a part of the output may end within a character.
    while remaining:
        remaining = remaining[os.write(sys.stdout.fileno(), remaining) :]
