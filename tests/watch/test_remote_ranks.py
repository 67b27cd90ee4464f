"""A rank on another host fails where no connection of the process group shows it, as over NCCL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_commopt.launch.lab import NetLab

_PROGRAM = Path(__file__).parent / "remote_script.py"
_LIMIT_S = 150


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rank", "fault"), [(0, "kill"), (1, "raise")])
def test_a_rank_that_waits_in_backward_for_another_host_ends(
    lab_machine: None, tmp_path: Path, rank: int, fault: str
) -> None:
    """If it fails, a job of several nodes waits half an hour for a rank that is dead."""
    outputs = _run(rank, fault, tmp_path)
    waited = outputs[1 - rank]
    what = "failed:" if fault == "raise" else "died: its process"
    assert f"[rank {1 - rank}] Rank {rank} has {what}" in waited, waited
    assert waited.endswith(f"[rank {1 - rank}] This rank has waited for 1 s, and ends.\nSTATUS 1\n"), waited
    if fault == "raise":
        assert "broken on purpose" in waited
        assert "STAYED" in outputs[rank], outputs[rank]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_what_ranks_of_several_hosts_catch(lab_machine: None, tmp_path: Path, rank: int) -> None:
    """If it fails, a program that catches an exception on all ranks is ended, as one of them is slow."""
    outputs = _run(rank, "all", tmp_path)
    assert outputs[1 - rank].endswith("CAUGHT\nSTATUS 0\n"), outputs[1 - rank]
    assert outputs[rank].endswith("STAYED\nSTATUS 0\n"), outputs[rank]


def _run(rank: int, fault: str, folder: Path) -> list[str]:
    paths = (_PROGRAM.parents[1], _PROGRAM.parents[2])
    command = f"{sys.executable} -W ignore {_PROGRAM} {rank} {fault} {folder}; echo STATUS $?; touch {folder}/ended"
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with NetLab(2) as lab:
        return lab.run(["sh", "-c", command], environment=environment, timeout_s=_LIMIT_S)


@pytest.mark.exhaustive
def test_ranks_that_elastic_launch_has_forked_are_not_always_in_a_collective(tmp_path: Path) -> None:
    """If it fails, a rank that only computes under ``elastic_launch`` is taken for one that waits."""
    program = (
        "import threading, torch.distributed.elastic.multiprocessing.api as launcher\n"
        "from lightning_commopt.watch.waiting import is_in_collective\n"
        "launcher.run = lambda fn: fn()\n"
        "exec(compile('def call(fn):\\n    fn()', 'api', 'exec'), vars(launcher))\n"
        "launcher.call(lambda: print(is_in_collective(threading.get_ident())))\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
