"""``commopt tune`` over a script that knows nothing of this package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_commopt import CommPlan

_SCRIPT = """
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


strategies = {"name": "ddp", "object": DDPStrategy(gradient_as_bucket_view=True), "fsdp": "fsdp"}
strategies["hook"] = DDPStrategy(ddp_comm_hook=bf16_compress_hook)
strategy = strategies[sys.argv[1]]
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
num_epochs = 20 if sys.argv[2] == "2" else 1  # one rank has nothing to find
trainer = Trainer(accelerator="cpu", devices=int(sys.argv[2]), strategy=strategy, max_epochs=num_epochs, **quiet)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=4))
print("steps", trainer.global_step, type(trainer.strategy).__name__)
"""


def _tune(folder: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    program = "from lightning_commopt.commands.app import app; app()"
    command = [sys.executable, "-c", program, "tune", *options, "--", sys.executable, str(script), *words]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300, check=False)


@pytest.mark.exhaustive
def test_it_finds_a_plan_and_writes_it(tmp_path: Path) -> None:
    """If it fails, a script cannot be tuned as it is, or its plan cannot be used."""
    ran = _tune(tmp_path, "object", "2", options=("--lossy", "bf16"))
    assert ran.returncode == 0, ran.stderr
    plan = CommPlan.load(tmp_path / "plan.json")
    assert plan.gradient_as_bucket_view is True
    assert "plan.json: CommOptDDP(plan='plan.json') trains with this plan." in ran.stdout.replace("\n", " ")
    steps = [line for line in ran.stdout.splitlines() if line.startswith("steps")]
    assert steps
    assert all(line.endswith("CommOptDDP") and int(line.split()[1]) < 10000 for line in steps)


@pytest.mark.parametrize(
    ("words", "options", "status", "message"),
    [
        (("name", "1"), (), 1, "no fit of COMMAND has looked for a plan"),
        pytest.param(
            *(("fsdp", "2"), (), 1, "commopt tune is for DDP, and the Trainer has strategy='fsdp'"),
            marks=pytest.mark.exhaustive,
        ),
        (("hook", "2"), (), 1, "the Trainer's DDPStrategy has a ddp_comm_hook"),
        (("name", "2"), ("--lossy", "int7"), 2, "lossy: .*int7"),
        (("name", "2"), ("--output", "nowhere/plan.json"), 2, "there is no folder"),
    ],
)
def test_what_cannot_be_tuned(
    tmp_path: Path, words: tuple[str, ...], options: tuple[str, ...], status: int, message: str
) -> None:
    """If it fails, a user reads a traceback of ours, or thinks that a plan was found."""
    ran = _tune(tmp_path, *words, options=options)
    assert ran.returncode == status, ran.stderr
    assert re.search(message, ran.stderr), ran.stderr
    assert not (tmp_path / "plan.json").exists()
