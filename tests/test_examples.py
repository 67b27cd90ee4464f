"""Every example runs as its first lines say, and learns."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_commopt.rank_variables import RANK_VARIABLES

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 150


def _start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        left = _wait_for_the_end(process.pid)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # every process says where it stands
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if len(line) < 300]  # without lists of modules
        pytest.fail(f"no end after {LIMIT_S} s; the last lines:\n" + "\n".join(lines[-150:]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    assert not left, f"the example left processes behind: {left}"
    return output


def _wait_for_the_end(group: int) -> list[str]:
    """Returns the processes of the group that still run, once a child has had time to follow its parent."""
    deadline = time.monotonic() + 30
    while left := _running(group):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def _running(group: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, process_group, *_ = path.read_text().rpartition(") ")[2].split()
            if int(process_group) == group and state != "Z":
                found.append(path.parent.name)
    return found


def _run(folder: Path, name: str, *arguments: str) -> str:
    return _finish(_start(folder, str(EXAMPLES / name), *arguments))


def test_plain(tmp_path: Path) -> None:
    """If it fails, the two-line change to a Lightning script does not work."""
    output = _run(tmp_path, "plain.py")
    assert "Starting with 2 processes" in output
    assert "max_epochs=3` reached" in output


def test_plain_differs_in_two_lines() -> None:
    """If it fails, the README's claim about the size of the change is wrong."""
    lines = (EXAMPLES / "plain.py").read_text().splitlines()
    assert len([line for line in lines if "commopt" in line.lower()]) == 2


def test_measure(tmp_path: Path) -> None:
    """If it fails, an existing project cannot be measured, or no trace comes of it."""
    output = _run(tmp_path, "measure.py")
    assert "of the step" in output
    assert "steps/s" in output
    command = [sys.executable, "-c", "from lightning_commopt.cli import app; app()", "trace", "measured"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert "87 steps were saved" in said
    assert (tmp_path / "measured" / "comm_time" / "trace.json").stat().st_size > 10_000


def test_fabric(tmp_path: Path) -> None:
    """If it fails, the Fabric example is broken or compresses nothing."""
    output = _run(tmp_path, "fabric.py")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 1.5


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trainer.strategy", "lightning_commopt.CommOptDDP", "--trainer.strategy.comm_hook", "bf16"),
        ("--config", str(EXAMPLES / "cli.yaml")),
    ],
    ids=["flags", "yaml"],
)
def test_cli(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """If it fails, LightningCLI cannot make the strategy."""
    output = _run(tmp_path, "cli.py", "fit", *arguments, "--trainer.devices", "2", "--trainer.max_epochs", "2")
    assert "Starting with 2 processes" in output
    assert "max_epochs=2` reached" in output


def test_hydra_sweep_over_plans_and_devices(tmp_path: Path) -> None:
    """If it fails, a job of a multirun trains on another number of ranks than it says, or not at all."""
    sweep = ("-m", "strategy.comm_hook=none,bf16", "trainer.devices=1,2,1", "trainer.max_epochs=1")
    output = _run(tmp_path, "hydra_app.py", *sweep)
    jobs = re.findall(r"^(\d) ranks, (\{.*?\}): \{'val_accuracy': ([\d.]+)\}$", output, re.MULTILINE)
    assert [int(ranks) for ranks, _, _ in jobs] == [1, 2, 1] * 2
    assert ["bf16" in plan for _, plan, _ in jobs] == [False] * 3 + [True] * 3
    folders = {path.name for path in next(iter((tmp_path / "multirun").glob("*/*"))).iterdir() if path.is_dir()}
    assert folders == {"0", "1", "2", "3", "4", "5"}
    assert len(list((tmp_path / "multirun").glob("*/*"))) == 1


def test_hydra_downstream_group(tmp_path: Path) -> None:
    """If it fails, +commopt=NAME does not work in a project of the user's own."""
    output = _run(tmp_path, "hydra_app.py", "+commopt=powersgd", "trainer.max_epochs=1")
    assert "2 ranks, {'comm_hook': {'name': 'powersgd'" in output


def test_two_nodes(tmp_path: Path) -> None:
    """If it fails, torchrun over two nodes does not work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    address = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    nodes = [
        _start(tmp_path, *torchrun, *address, "--node-rank", str(rank), str(EXAMPLES / "two_nodes.py"))
        for rank in range(2)
    ]
    outputs = [_finish(node) for node in nodes]
    accuracy = re.search(r"2 ranks, accuracy ([\d.]+)", outputs[0] + outputs[1])
    assert accuracy, outputs[0][-2000:]
    assert float(accuracy[1]) > 0.6


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short(path: Path) -> None:
    """If it fails, an example has outgrown a screen."""
    assert len(path.read_text().splitlines()) <= 60
