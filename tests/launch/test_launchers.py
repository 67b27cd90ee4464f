"""The forms of docs/launchers.md: torchrun, srun, and Hydra's launcher for SLURM."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from tiny_runs import TINY
from typer.testing import CliRunner

from lightning_commopt.cli import app
from lightning_commopt.compat.hydra import VERSION_BASE
from lightning_commopt.conf_path import conf_dir
from lightning_commopt.measure.files import read_run
from lightning_commopt.runs.losses import read_losses
from lightning_commopt.runs.record import RunRecord
from lightning_commopt.sweep.job import SweepObserver
from lightning_commopt.train import register_with_hydra

PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"
LIMIT_S = 240


def commands(program):
    """Returns the commands of the page that run a program, each as its words."""
    blocks = re.findall(r"(?:^    .*\n)+", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", "".join(blocks)).splitlines()
    return [shlex.split(line.strip().rstrip(";")) for line in lines if line.strip().startswith(program)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def assert_recorded(folder, name):
    record = RunRecord.load(folder)
    assert (record.status, record.sync_method, record.world_size) == ("finished", name, 2)
    assert record.num_timed_steps == 3
    assert record.val_loss is not None
    assert [point.step for point in read_losses(folder) if point.kind == "train"] == [1, 2, 3, 4]
    assert [len(rank.steps) for rank in read_run(folder)] == [4, 4]


def finish(processes):
    """Waits for processes that run side by side; all of them end well."""
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


@pytest.mark.exhaustive
def test_torchrun_leaves_the_records_of_a_sweep(tmp_path):
    (words,) = commands("torchrun")
    assert words[1:3] == ["--nproc-per-node=2", "-m"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    names = ("none", "bf16")
    finish(
        [
            subprocess.Popen(
                [*torchrun, *(word.replace("$plan", name) for word in words[1:]), *TINY],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in names
        ]
    )
    for name in names:
        assert_recorded(tmp_path / "sweeps" / "plans" / name, name)
    report = CliRunner().invoke(app, ["report", "--json", str(tmp_path / "sweeps" / "plans")])
    assert report.exit_code == 0, report.output
    assert '"bf16"' in report.stdout


@pytest.mark.exhaustive
def test_srun_trains_with_its_tasks_as_ranks(tmp_path):
    (words,) = commands("srun")
    own = words[words.index("commopt-train") + 1 :]
    of_job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "lightning_commopt.train", *own, *TINY],
            cwd=tmp_path,
            env={**os.environ, **of_job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for task in range(2)
    ]
    finish(tasks)
    assert_recorded(tmp_path / "sweeps" / "plans" / "bf16", "bf16")


@pytest.mark.filterwarnings("ignore")  # what the plugin imports warns of
def test_slurm_launcher_composes(monkeypatch):
    monkeypatch.setattr("sys.argv", ["commopt-train"])
    register_with_hydra(SweepObserver())
    (words,) = commands("commopt-train -m hydra/launcher=submitit_slurm")
    # A sweep's lists are split before a job is composed.
    one_job = [
        word.split(",")[0] if OverridesParser.create().parse_override(word).is_sweep_override() else word
        for word in words[2:]
    ]
    with initialize_config_dir(str(conf_dir()), **VERSION_BASE):
        config = compose("train", one_job, return_hydra_config=True)
    launcher = config.hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert launcher.nodes * launcher.tasks_per_node == config.trainer.num_nodes * config.trainer.devices == 16
    assert launcher.gpus_per_node == config.trainer.devices
