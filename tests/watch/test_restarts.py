"""Jobs of torchrun in which a rank fails: they start again, and end as if nothing had happened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from restarted_fits import Sharded, Steady, fit, train_with_fabric, whole_state

from support.marked_processes import Program
from support.ranks import run_ranks
from support.strategy_models import Params, assert_same

_SCRIPT = str(Path(__file__).parent / "restarting_script.py")
_LIMIT_S = 120
"""Only against waiting for ever: a job imports all twice, which is what it takes its time for."""

_KINDS = (
    ("lightning.pytorch", False),
    ("lightning.pytorch", True),
    ("pytorch_lightning", False),
    ("pytorch_lightning", True),
    ("fsdp2", False),
    ("fabric", False),
)
_FAULTS = (("raise", 1), ("raise", 0), ("kill", 1), ("kill", 0))
_CASES = [
    (rendezvous, *kind, *fault)
    for rendezvous in ("standalone", "c10d", "static", "agents")
    for kind in _KINDS
    for fault in _FAULTS
]
if "COMMOPT_EVERY_RESTART" not in os.environ:  # all take most of an hour
    _CASES = [
        ("c10d", "pytorch_lightning", True, "kill", 0),
        ("static", "fabric", False, "raise", 0),
        ("c10d", "fsdp2", False, "kill", 1),
        ("agents", "lightning.pytorch", True, "raise", 1),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rendezvous", "kind", "has_monitor", "fault", "rank"), _CASES)
def test_job_goes_on_after_a_restart(
    rendezvous: str, kind: str, has_monitor: bool, fault: str, rank: int, tmp_path: Path
) -> None:
    """If it fails, a job that torchrun restarts meets what the attempt before has left, and waits or ends."""
    arguments = [_SCRIPT, str(tmp_path), kind, str(int(has_monitor)), fault, str(rank)]
    programs = []
    try:
        for number, options in enumerate(_torchruns(rendezvous)):
            folder = tmp_path / f"agent{number}"
            folder.mkdir()
            programs.append(Program(["-m", "torch.distributed.run", "--max-restarts=1", *options, *arguments], folder))
        have_ended = [program.wait(_LIMIT_S) for program in programs]
        told = "\n\n".join(program.output for program in programs)
        assert all(have_ended), f"{[program.processes() for program in programs]} are left: {told}"
        assert [program.process.returncode for program in programs] == [0] * len(programs), told
    finally:
        for program in programs:
            program.kill()
    assert (tmp_path / "failed").exists()
    assert (tmp_path / "attempts").read_text().startswith("xx")
    got = {name: tensor.double().numpy() for name, tensor in torch.load(tmp_path / "weights.pt").items()}
    (tmp_path / "without").mkdir()
    for expected in run_ranks(_train_without_failure, tmp_path / "without", kind):
        assert_same(got, expected)
        assert all(np.isfinite(values).all() for values in got.values())


def _torchruns(rendezvous: str) -> list[list[str]]:
    """Returns the options of every torchrun of a job on two ranks."""
    if rendezvous == "standalone":
        return [["--standalone", "--nproc-per-node=2"]]
    if rendezvous == "c10d":
        return [["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=2"]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if rendezvous == "static":
        master = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        return [["--rdzv-backend=static", *master, "--nproc-per-node=2"]]
    agent = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    return [[*agent, "--nproc-per-node=1"]] * 2


def _train_without_failure(folder: Path, kind: str) -> Params:
    model = Sharded() if kind == "fsdp2" else Steady()
    if kind == "fabric":
        train_with_fabric(model, folder, devices=2)
    else:
        fit(model, folder, devices=2)
    return {name: value.double().numpy() for name, value in whole_state(model).items()}
