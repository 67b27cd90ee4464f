"""Ranks that end before there is a process group are named, and the others end; slow ranks are left alone."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.plugins import environments

from lightning_commopt.launch import environment
from lightning_commopt.watch import ended_ranks, times
from lightning_commopt.watch.ended_ranks import _LAUNCHERS, EndedRanks
from support.cross_section import sampled
from support.marked_processes import Program

_HERE = Path(__file__).parent
_SCRIPT = str(_HERE / "leaving_script.py")
_LIMIT_S = 500
"""Only against waiting for ever: torch's own limit is half an hour."""

_PROBE = """
import sys, time
from types import SimpleNamespace
from lightning_commopt.watch import ended_ranks, times
times.PROCESSES_LOOK_S, times.ABSENT_S = 0.02, 0.2
names = {"LOCAL_RANK": "TorchElasticEnvironment", "SLURM_LOCALID": "SLURMEnvironment"}
environment = type(names[sys.argv[1]], (), {"local_rank": lambda self: 0, "main_port": 1})()
strategy = SimpleNamespace(launcher=None, cluster_environment=environment)
ended = ended_ranks.EndedRanks(strategy, range(4, 6))
end = time.monotonic() + float(sys.argv[2])
text = None
while text is None and time.monotonic() < end:
    text, seen = ended.find(), ended.processes()
    time.sleep(0.02)
print(text, *seen)
"""
_SLEEPING = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def _strategy(children: list[Any] | None = None, local_rank: int = 0) -> SimpleNamespace:
    launcher = SimpleNamespace(children=children or [])
    return SimpleNamespace(
        launcher=launcher, cluster_environment=SimpleNamespace(local_rank=lambda: local_rank, main_port=1234)
    )


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(0)", "has ended with status 0 before it joined"),
        ("raise SystemExit(3)", "has ended with status 3 before it joined"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL before it joined"),
    ],
)
def test_children_of_lightnings_launcher(code: str, how: str) -> None:
    """If it fails, rank 0 waits half an hour for a rank that it has seen ending."""
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as child:
        child.wait()
        runs = SimpleNamespace(poll=lambda: None, pid=77)
        ended = EndedRanks(_strategy([runs, child]), range(2, 5))
        text = ended.find()
    assert ended.processes() == {3: 77}
    assert text is not None
    assert text.startswith("rank 4 on ")
    assert f"{how}: its process was {child.pid}. " in text
    assert text.endswith("its output shows where" if "status 0" in how else "Its output shows why")


def test_the_rank_that_has_started_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ranks go on waiting for a rank 0 that is gone, or do so for programs that ranks have started."""
    with subprocess.Popen(_SLEEPING) as other:
        with monkeypatch.context() as context:
            context.setattr(os, "getpid", lambda: other.pid)
            with environment.name_launcher(1234):
                variables = dict(os.environ)
        assert variables != os.environ
        monkeypatch.setattr(os, "environ", variables)
        ended, first = EndedRanks(_strategy(local_rank=1), range(2)), EndedRanks(_strategy(), range(2))
        assert ended.find() is None
        other.kill()
        other.wait()
    text = ended.find()
    assert text is not None
    assert text.startswith("rank 0 on ")
    assert f"has ended before it joined: its process {other.pid} had started this rank. " in text
    assert first.find() is None
    monkeypatch.setitem(variables, "TORCHELASTIC_RUN_ID", "job")
    assert EndedRanks(_strategy(local_rank=1), range(2)).find() is None


def _probe_beside(variable: str, other: str, *, limit_s: float) -> str:
    """Returns what local rank 0 finds of ``other``, a command of a shell that stands for torchrun or srun."""
    beside = f"export {variable}=1; ({other}) >/dev/null 2>&1 & other=$!"
    launcher = f'export {variable}=0; "$@" & probe=$!; {beside}; wait $probe; kill $other'
    command = ["sh", "-c", launcher, "sh", sys.executable, "-c", _PROBE, variable, str(limit_s)]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(_HERE.parents[1])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize(
    ("variable", "how"),
    [
        ("LOCAL_RANK", "has ended with status 0 before it joined: torchrun has no process of it any more. Probably"),
        pytest.param(
            *("SLURM_LOCALID", "before it joined: srun has no process of it any more. "), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_tasks_beside_this_one(variable: str, how: str) -> None:
    """If it fails, a rank under torchrun or srun waits for one that has left by ``sys.exit(0)``."""
    assert all(hasattr(environments, name) for name in _LAUNCHERS), "the probe has classes of its own"
    text = _probe_beside(variable, "exec true", limit_s=_LIMIT_S)
    assert text.startswith("rank 5 on ")
    assert how in text
    assert text.endswith(" 4")


@pytest.mark.parametrize(
    "other",
    sampled(["exec sleep 60", "sleep 60; true", "exec env -u LOCAL_RANK sleep 60"], by_default=["sleep 60; true"]),
)
def test_tasks_that_only_take_their_time(other: str) -> None:
    """If it fails, a rank that is slow, or of which the kernel shows no variables, is taken for one that has ended."""
    assert _probe_beside("LOCAL_RANK", other, limit_s=1) == ("None 4 5" if other == "exec sleep 60" else "None")


def test_one_look_alone_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a rank is said to have ended that its launcher is about to start."""
    ended = EndedRanks(_strategy(), range(2))
    monkeypatch.setattr(ended, "_launcher", "torchrun")
    monkeypatch.setattr(ended_ranks, "_launcher_pid", lambda variable: 0)
    monkeypatch.setattr(ended_ranks, "_processes_below", lambda pid, variable: {0: 7})
    monkeypatch.setattr(times, "PROCESSES_LOOK_S", 0.0)
    monkeypatch.setattr(ended, "_look_at", 0.0)
    assert ended.find() is None
    monkeypatch.setattr(times, "ABSENT_S", 0.0)
    assert str(ended.find()).startswith("rank 1 on ")


def _command(launcher: str, num_ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [*torchrun, f"--nproc-per-node={num_ranks}"] if launcher == "torchrun" else []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "num_ranks", "rank", "fault"),
    [("popen", 2, 1, "exit 0"), ("popen", 3, 0, "kill"), ("torchrun", 3, 0, "exit 0")],
)
def test_the_others_end(launcher: str, num_ranks: int, rank: int, fault: str, tmp_path: Path) -> None:
    """If it fails, the others wait in ``init_process_group``, and nobody is told for whom."""
    arguments = [_SCRIPT, str(num_ranks), str(rank), fault]
    program = Program([*_command(launcher, num_ranks), *arguments], tmp_path)
    program.finish(_LIMIT_S)
    output = program.output
    assert f" s in init_process_group: rank {rank} on " in output, output
    if launcher != "popen" or rank != 0:
        assert program.process.returncode != 0
        assert re.search(rf"rank {rank} on \S+ has ended with status 0 before it joined", output), output
    assert "This rank has waited for 5 s, and ends." in output
    assert "TRAINED" not in output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("launcher", "rank"), [("popen", 0), ("torchrun", 1)])
def test_a_slow_rank_is_waited_for(launcher: str, rank: int, tmp_path: Path) -> None:
    """If it fails, a rank that prepares data for long before it joins makes the others end."""
    num_s = 2 * (times.ABSENT_S + 10)
    program = Program([*_command(launcher, 2), _SCRIPT, "2", str(rank), f"sleep {num_s}"], tmp_path)
    began = time.monotonic()
    program.finish(_LIMIT_S)
    assert time.monotonic() - began > num_s
    assert program.process.returncode == 0, program.output
    assert program.output.count("TRAINED 3") == 2, program.output
    assert "before it joined" not in program.output
