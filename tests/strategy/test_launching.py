"""Ranks that Lightning's launchers and torchrun start, in an environment of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from strategy_models import Params, SelfFed, assert_same, numbers, trainer

from lightning_commopt import CommOptDDP
from ranks import run_ranks

_FOLDER = Path(__file__).parent
_SCRIPT = str(_FOLDER / "launched_script.py")
_LIMIT_S = 120


def _run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Runs Python in a session of its own; returns its status and output. No process outlives the call."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"PYTHONPATH": f"{_FOLDER}:{_FOLDER.parents[1]}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=_LIMIT_S)
            assert _ends(process.pid), "a process was left"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def _ends(group: int) -> bool:
    """Returns whether the process group is gone, after a grace period."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _fit() -> Params:
    module = SelfFed()
    trainer(CommOptDDP()).fit(module)
    return numbers(module)


@cache
def _expected() -> Params:
    return run_ranks(_fit)[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _trained(path: Path, start_method: str) -> Params:
    with np.load(path) as saved:
        return {name.split()[1]: saved[name] for name in saved if name.split()[0] == start_method}


@pytest.mark.parametrize("start_methods", [["popen"], ["spawn", "fork"]], ids=["popen", "spawn_and_fork"])
def test_lightnings_launchers(start_methods: list[str], tmp_path: Path) -> None:
    """If it fails, the strategy does not train in ranks that Lightning starts, or leaves a process behind."""
    status, output = _run([_SCRIPT, "params.npz", *start_methods], tmp_path)
    assert status == 0, output
    for start_method in start_methods:
        assert_same(_trained(tmp_path / "params.npz", start_method), _expected(), rtol=1e-6)


def test_torchrun(tmp_path: Path) -> None:
    """If it fails, the strategy does not train under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(_free_port())]
    status, output = _run([*torchrun, _SCRIPT, "params.npz", "popen"], tmp_path)
    assert status == 0, output
    assert_same(_trained(tmp_path / "params.npz", "popen"), _expected(), rtol=1e-6)


def test_exception_in_a_launched_rank(tmp_path: Path) -> None:
    """If it fails, an exception in one rank leaves the others hanging, or is not shown."""
    status, output = _run([_SCRIPT, "params.npz", "popen", "--breaks"], tmp_path)
    assert status != 0
    assert "ArithmeticError" in output
    assert "broken on purpose" in output
