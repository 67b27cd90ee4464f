"""Every example runs as its first lines say, and learns."""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.launch.environment import RANK_VARIABLES
from lightning_commopt.measure.runs.record import RunRecord
from support.cross_section import sampled
from support.process_groups import is_group_gone
from support.side_by_side import two_at_a_time

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 300  # only against waiting for ever
# Threads that start examples do not read `os.environ` themselves, as pytest changes a variable of it for each test.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        is_gone = is_group_gone(process.pid)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # every process says where it stands
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if len(line) < 300]  # without lists of modules
        pytest.fail(f"no end after {LIMIT_S} s; the last lines:\n" + "\n".join(lines[-150:]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    assert is_gone, "the example left processes behind"
    return output


RUNS = {
    "plain": ("plain.py",),
    "measure": ("measure.py",),
    "metrics": ("metrics.py",),
    "fabric": ("fabric.py",),
    "own compressor": ("own_compressor.py",),
    "cli": ("cli.py", "fit", "--config", str(EXAMPLES / "cli.yaml"), "--trainer.max_epochs", "2"),
    "sweep": ("hydra_app.py", "-m", "+commopt=none,powersgd", "trainer.devices=1,2", "trainer.max_epochs=1"),
}


# Tests of the callbacks, of LightningCLI, of Fabric, of launchers and of foreign projects show by default what they do.


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[tuple[Path, str]]]]:

    def run(name: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        script, *arguments = RUNS[name]
        return folder, _finish(_start(folder, str(EXAMPLES / script), *arguments))

    with two_at_a_time(request, "example", run) as started:
        yield started


@pytest.fixture
def example(request: pytest.FixtureRequest, runs: dict[str, Future[tuple[Path, str]]]) -> tuple[Path, str]:
    """The folder that an example ran in, and what it said."""
    return runs[request.param].result()


def runs_example(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", sampled(names, by_default=[]), indirect=True)


@runs_example("plain")
def test_plain(example: tuple[Path, str]) -> None:
    """If it fails, the two-line change to a Lightning script does not work."""
    _, output = example
    assert "Starting with 2 processes" in output
    assert "max_epochs=3` reached" in output


def test_plain_differs_in_two_lines() -> None:
    """If it fails, the README's claim about the size of the change is wrong."""
    lines = (EXAMPLES / "plain.py").read_text().splitlines()
    assert len([line for line in lines if "commopt" in line.lower()]) == 2


@runs_example("measure")
def test_measure(example: tuple[Path, str]) -> None:
    """If it fails, an existing project cannot be measured, or no trace comes of it."""
    folder, output = example
    assert "steps/s" in output
    assert "4.37 MB of gradients per step and rank" in output
    printed = CliRunner().invoke(app, ["trace", str(folder / "measured")], catch_exceptions=False).output
    assert "87 steps saved" in printed
    assert (folder / "measured" / "comm_time" / "trace.json").stat().st_size > 10_000


@runs_example("metrics")
def test_metrics(example: tuple[Path, str]) -> None:
    """If it fails, a LightningModule cannot log the metrics of its steps, or they are not of one epoch each."""
    folder, output = example
    printed = json.loads(re.findall(r"^(\{'exposed'.*\})$", output, re.MULTILINE)[0].replace("'", '"'))
    with (folder / "metrics" / "csv" / "metrics.csv").open() as file:
        logged = [line for line in csv.DictReader(file) if line["exposed"]]
    assert len({line["exposed"] for line in logged}) == len(logged) == 3
    for name, value in printed.items():
        assert value == pytest.approx(float(logged[-1][name]), abs=1e-4)
    assert 0 < printed["exposed"] < 1
    assert printed["step_p95"] > 0
    assert printed["straggler"] in (-1, 0, 1)


@runs_example("fabric")
def test_fabric(example: tuple[Path, str]) -> None:
    """If it fails, the Fabric example is broken or compresses nothing."""
    _, output = example
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < 1.5


@runs_example("own compressor")
def test_own_compressor(example: tuple[Path, str], tmp_path: Path) -> None:
    """If it fails, a compressor of a user's own does not train, or is lost in checkpoints, records or the report."""
    folder, _ = example
    record = json.loads((folder / "own" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["world_size"] == 2
    options = RunRecord.load(folder / "own").settings.plan_options
    settings = {name: options[f"comm_hook.inner.{name}"] for name in ("name", "share")}
    assert settings == {"name": "topk", "share": 0.05}
    assert record["metrics"]["val_accuracy"] > 0.6
    assert "topk" in CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False).output

    _finish(_start(tmp_path, str(EXAMPLES / "own_compressor.py"), str(folder / "own" / "epoch=0.ckpt")))
    once, resumed = (torch.load(path / "own" / "epoch=2.ckpt") for path in (folder, tmp_path))
    assert all(torch.equal(values, resumed["state_dict"][name]) for name, values in once["state_dict"].items())
    assert '"topk"' in once["lightning_commopt"]["compressor"]


@runs_example("cli")
def test_cli(example: tuple[Path, str]) -> None:
    """If it fails, LightningCLI cannot make the strategy."""
    _, output = example
    assert "Starting with 2 processes" in output
    assert "max_epochs=2` reached" in output


@runs_example("sweep")
def test_hydra_sweep_over_plans_and_devices(example: tuple[Path, str]) -> None:
    """If it fails, a job trains on another number of ranks than it says, or +commopt=NAME does not work."""
    folder, output = example
    jobs = re.findall(r"^(\d) ranks, (\{.*?\}): \{'val_accuracy': ([\d.]+)\}$", output, re.MULTILINE)
    assert [int(ranks) for ranks, _, _ in jobs] == [1, 2] * 2
    assert ["{'name': 'powersgd'" in plan for _, plan, _ in jobs] == [False] * 2 + [True] * 2
    (sweep,) = (folder / "multirun").glob("*/*")
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1", "2", "3"}


@pytest.mark.exhaustive
def test_two_nodes(tmp_path: Path, port: int) -> None:
    """If it fails, torchrun over two nodes does not work."""
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
