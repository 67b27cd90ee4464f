"""The forms of docs/how_to/launchers.md: torchrun, srun, and Hydra's launcher for SLURM."""

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
from rich.console import Console
from typer.testing import CliRunner

from lightning_commopt.commands.app import app
from lightning_commopt.compat.hydra import VERSION_BASE
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.runs.losses import read_losses
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.launcher import register_with_hydra
from support.tiny_runs import TINY

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "launchers.md"
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


def start(command, folder, **env):
    return subprocess.Popen(
        [sys.executable, "-m", *command, *TINY],
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_torchrun(folder, plan):
    (words,) = commands("torchrun")
    assert words[1:3] == ["--nproc-per-node=2", "-m"]
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    return start(["torch.distributed.run", *options, *(word.replace("$plan", plan) for word in words[1:])], folder)


def start_srun(folder):
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
    return [
        start(["lightning_commopt.train.train", *own], folder, **of_job, SLURM_PROCID=task, SLURM_LOCALID=task)
        for task in ("0", "1")
    ]


@pytest.mark.exhaustive
def test_torchrun_and_srun_leave_the_records_of_a_sweep(tmp_path):
    """If it fails, ranks that torchrun or srun starts do not find each other, or a report finds no runs of theirs."""
    finish([start_torchrun(tmp_path, "none"), *start_srun(tmp_path)])
    for name in ("none", "bf16"):
        assert_recorded(tmp_path / "sweeps" / "plans" / name, name)
    report = CliRunner().invoke(app, ["report", "--json", str(tmp_path / "sweeps" / "plans")])
    assert report.exit_code == 0, report.output
    assert '"bf16"' in report.stdout


@pytest.mark.filterwarnings("ignore")  # what the plugin imports warns of
def test_slurm_launcher_composes():
    register_with_hydra((), SweepDisplay(Console(quiet=True)))
    words, *_ = commands("commopt-train -m hydra/launcher=submitit_slurm")
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
