"""Jobs of torchrun in which a rank fails: they start again, and end as if nothing had happened."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from restarting_script import train

from support.marked_processes import Program
from support.ranks import run_ranks
from support.strategy_models import Params, assert_same

_SCRIPT = str(Path(__file__).parent / "restarting_script.py")
_LIMIT_S = 300
"""Only against waiting for ever: a job imports all twice, which is what it takes its time for."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rendezvous", "package", "kind", "has_monitor", "fault", "rank"),
    [
        ("c10d", "pytorch_lightning", "ddp", True, "kill", 0),
        ("static", "lightning.pytorch", "fabric", False, "raise", 0),
        ("c10d", "lightning.pytorch", "fsdp2", False, "kill", 1),
        ("agents", "lightning.pytorch", "ddp", True, "raise", 1),
    ],
)
def test_job_goes_on_after_a_restart(
    rendezvous: str,
    package: str,
    kind: str,
    has_monitor: bool,
    fault: str,
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it fails, a job that torchrun restarts meets what the attempt before has left, and waits or ends."""
    arguments = [_SCRIPT, str(tmp_path), kind, str(int(has_monitor)), fault, str(rank)]
    monkeypatch.setenv("LIGHTNING_PACKAGE", package)
    programs = []
    try:
        for number, options in enumerate(_torchruns(rendezvous)):
            folder = tmp_path / f"agent{number}"
            folder.mkdir()
            programs.append(Program(["-m", "torch.distributed.run", "--max-restarts=1", *options, *arguments], folder))
        monkeypatch.undo()
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
    for expected in run_ranks(_train_without_failure, kind, tmp_path / "without"):
        assert_same(got, expected)
        assert all(np.isfinite(values).all() for values in got.values())


def _torchruns(rendezvous: str) -> list[list[str]]:
    """Returns the options of every torchrun of a job on two ranks."""
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


def _train_without_failure(kind: str, folder: Path) -> Params:
    return {name: value.double().numpy() for name, value in train(kind, folder, devices=2).items()}
