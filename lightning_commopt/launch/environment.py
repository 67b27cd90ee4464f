"""The variables by which launchers pass its rank to a process."""

from __future__ import annotations

import multiprocessing
import os

_NUMBERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")

RANK_VARIABLES = (*_NUMBERS, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by Lightning, torchrun or the network lab, but not by SLURM."""

LAB_RANK_VARIABLE = "COMMOPT_LAB_RANK"
"""Set for a rank that `lightning_commopt.train.sweep.lab_run` has started."""


def is_lab_rank() -> bool:
    """Returns whether this process is a rank on a host of the network lab."""
    return LAB_RANK_VARIABLE in os.environ


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, or the only one; works before there is a process group."""
    # In every launcher, global rank 0 has 0 or nothing in all of them.
    return all(os.environ.get(name, "0") == "0" for name in (*_NUMBERS, "SLURM_PROCID"))


def num_started_ranks() -> int:
    """Returns how many processes torchrun or srun has started to run this; 1 without them.

    ``SLURM_NTASKS`` is how many a job could have. Without ``RANK``, ``WORLD_SIZE`` may be left of an earlier job that
    Lightning ran in this process.
    """
    return max(
        _integer_in_environment("WORLD_SIZE", default=1) if "RANK" in os.environ else 1,
        _integer_in_environment("SLURM_STEP_NUM_TASKS", default=1),
        _integer_in_environment("SLURM_PROCID", default=0) + 1,
    )


def has_external_launcher() -> bool:
    """Returns whether this process is a rank that torchrun, srun or Lightning has started."""
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or num_started_ranks() > 1


def launcher_pid(start_method: str) -> int | None:
    """Returns the process that has started this rank and outlives all ranks; None if there is none.

    With the start method "popen" Lightning's other ranks are children of rank 0, which may end first.
    """
    is_forked = start_method != "popen" and multiprocessing.parent_process() is not None
    return os.getppid() if is_forked or "TORCHELASTIC_RUN_ID" in os.environ else None


def _integer_in_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
