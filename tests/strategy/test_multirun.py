"""Jobs of a Hydra multirun, all in one process: one that fails ends by itself, and the next ones run."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_commopt.strategy import lightning_launcher
from lightning_commopt.strategy.lightning_launcher import multirun_job
from support.marked_processes import Program

_SCRIPT = str(Path(__file__).parent / "sweeping_script.py")
_LIMIT_S = 240
"""Only against waiting for ever: each rank of each job imports everything."""

_CASES = [
    ("ddp", "after the fit", -1, True),
    ("ddp", "after the fit, late", -1, False),
    ("ddp", "before the group", 0, False),
    ("fsdp2", "after the fit", -1, False),
]


def _sweep(folder: Path, *overrides: str) -> Program:
    return Program([_SCRIPT, "-m", "hydra.sweep.dir=sweep", *overrides], folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "fault", "rank", "has_callbacks"),
    _CASES,
)
def test_jobs_after_one_that_raises_run(kind: str, fault: str, rank: int, has_callbacks: bool, tmp_path: Path) -> None:
    """If it fails, one job's error ends a sweep, or leaves processes behind."""
    options = (f"kind={kind}", f"rank={rank}", f"has_callbacks={str(has_callbacks).lower()}")
    program = _sweep(tmp_path, f"fault='{fault} ',' '", *options, "hydra.sweep.subdir=.")
    assert program.finish(_LIMIT_S) == 1, program.output
    assert "ArithmeticError: broken" in program.output
    assert "JOB DONE ' ' in 3 steps" in program.output, program.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("fault", "status"), [("after the fit exit 3", 3)])
def test_a_job_that_exits_ends_the_sweep(fault: str, status: int, tmp_path: Path) -> None:
    """If it fails, a sweep that a job ends leaves processes behind, or hides the status."""
    program = _sweep(tmp_path, f"fault='{fault}',' '")
    assert program.finish(_LIMIT_S) == status, program.output
    assert "JOB DONE" not in program.output


@pytest.mark.parametrize("mode", [None, *RunMode])
def test_jobs_of_a_multirun_are_known(mode: RunMode | None) -> None:
    """If it fails, each rank of a job repeats the whole sweep, or a single run is taken for a job of one."""
    job: Any = None if mode is None else OmegaConf.create({"hydra": {"mode": mode}})
    HydraConfig.instance().cfg = job
    assert multirun_job() is (job if mode == RunMode.MULTIRUN else None)


_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


@pytest.mark.parametrize(("has_joined", "status"), [(False, -signal.SIGKILL), (True, 0)])
def test_ranks_that_a_job_has_left_alone(has_joined: bool, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank that waits to join stays behind for ever, or one that may still save its work is ended."""
    monkeypatch.setattr(lightning_launcher, "_TERMINATE_GRACE_S", 0.1)
    program = _DEAF.replace("600", "0.5") if has_joined else _DEAF
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as rank, ExitStack() as end:
        end.callback(rank.kill)
        assert rank.stdout is not None
        rank.stdout.readline()
        launcher = Mock(children=[rank], has_joined=has_joined, num_processes=2)
        launcher.cluster_environment.node_rank.return_value = 0
        lightning_launcher._JobObserver(launcher, object()).run()  # no job runs in this process
    assert rank.returncode == status
