"""Finds out which rank this process is, and who has started it, from launchers' variables."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager

_NUMBERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")

RANK_VARIABLES = (*_NUMBERS, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by Lightning, torchrun or the network lab, but not by SLURM."""

LAB_RANK_VARIABLE = "COMMOPT_LAB_RANK"
"""Set for a rank that `lightning_commopt.train.sweep.lab_run` has started."""

_LAUNCHER_VARIABLE = "COMMOPT_LAUNCHER"
"""Holds the process ID of the rank that has started this one as its child, and the port where these ranks meet."""


def is_lab_rank() -> bool:
    """Returns whether this process is a rank on a host of the network lab."""
    return LAB_RANK_VARIABLE in os.environ


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, or the only one; works before there is a process group."""
    # With every launcher, only global rank 0 has all of these variables unset or 0.
    return all(os.environ.get(name, "0") == "0" for name in (*_NUMBERS, "SLURM_PROCID"))


def num_started_ranks() -> int:
    """Returns how many processes torchrun or srun has started to run this; 1 without them.

    ``SLURM_NTASKS`` does not count here, as it is how many tasks a job could have. Without ``RANK``, ``WORLD_SIZE`` may
    be left from an earlier job that Lightning ran in this process.
    """
    return max(
        _number("WORLD_SIZE", 1) if "RANK" in os.environ else 1,
        _number("SLURM_STEP_NUM_TASKS", 1),
        _number("SLURM_PROCID", 0) + 1,
    )


def has_external_launcher() -> bool:
    """Returns whether this process is a rank that torchrun, srun or Lightning has started."""
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or num_started_ranks() > 1


def launcher_pid(start_method: str) -> int | None:
    """Returns the ID of the process that has started this rank and outlives all ranks; None if there is none.

    With the start method "popen" Lightning's other ranks are children of rank 0, which may end first.
    """
    is_forked = start_method != "popen" and multiprocessing.parent_process() is not None
    return os.getppid() if is_forked or "TORCHELASTIC_RUN_ID" in os.environ else None


@contextmanager
def name_launcher(port: int) -> Generator[None, None, None]:
    """Tells ranks that this process starts inside the context who their launcher is: see `launching_rank`."""
    os.environ[_LAUNCHER_VARIABLE] = f"{os.getpid()} {port}"
    try:
        yield
    finally:
        del os.environ[_LAUNCHER_VARIABLE]


def launching_rank(port: int) -> int | None:
    """Returns the process ID of the rank that has started this one to meet at ``port``; None if it is unknown."""
    pid, _, known_port = os.environ.get(_LAUNCHER_VARIABLE, "").partition(" ")
    # Programs that a rank starts inherit the variable too, so it counts only for the port that it names.
    return int(pid) if known_port == str(port) and "TORCHELASTIC_RUN_ID" not in os.environ else None


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default
