"""``commopt tune`` over a script that knows nothing of this package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from lightning_commopt import CommOptDDP, CommPlan
from lightning_commopt.commands import trainers
from lightning_commopt.commands.tune.inject import tuned_strategy
from lightning_commopt.commands.tune.tuning import Tuning
from lightning_commopt.tune.auto_plan import FitPlan
from support.commopt import commopt, refusal
from support.lightnings import DDPStrategy
from support.ranks import run_ranks
from support.scripted_tuning import scripted
from support.strategy_models import Tiny, loader, trainer

_SMALL = CommPlan(bucket_cap_mb=0.001)
_SCRIPT = """
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and "fails_in_the_fit" in sys.argv:
            raise SystemExit(3)
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


strategies = {"name": "ddp", "object": DDPStrategy(gradient_as_bucket_view=True)}
strategy = strategies[sys.argv[1]]
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
is_long = sys.argv[2] == "2" and "short" not in sys.argv  # one rank has nothing to find
length = {"max_epochs": 20} if is_long else {"max_steps": 2}
trainer = Trainer(accelerator="cpu", devices=int(sys.argv[2]), strategy=strategy, **length, **quiet)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(4000, 8)), batch_size=4))
print("steps", trainer.global_step, type(trainer.strategy).__name__)
sys.exit(4 if "fails_after_the_fit" in sys.argv else 0)
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


def _fit_as_tuned(variable: dict[str, Any]) -> str:
    with patch.dict(os.environ, {trainers.VARIABLE: json.dumps(variable)}), scripted({_SMALL: 0.7}):
        trainers.install()
        run = trainer("ddp", max_epochs=1000)
        run.fit(Tiny(), loader())
        trainer("ddp", max_steps=3, max_epochs=1).fit(Tiny(), loader())  # too short to find anything
    assert run.global_step < 1000
    return type(run.strategy).__name__


@pytest.mark.exhaustive
def test_a_trainer_gets_a_plan_that_is_searched_for(tmp_path: Path) -> None:
    """If it fails, Trainers of a tuned program train without a search, to the end, or without the plan at the end."""
    asked = {"lossy": [], "folder": str(tmp_path), "ends_fit": True}
    variable = {"change": "lightning_commopt.commands.tune.inject:tune_trainer", "options": asked}
    assert run_ranks(_fit_as_tuned, {**variable, "note": str(tmp_path / "made")}) == ["CommOptDDP"] * 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert CommPlan.from_json(found["plan"]) == _SMALL
    assert "Chosen after" in found["verdict"]
    assert found["has_decided"]
    assert (tmp_path / "searched").exists()


@pytest.mark.exhaustive
def test_a_command_that_fails_before_a_plan_is_found_leaves_an_earlier_plan(tmp_path: Path) -> None:
    """If it fails, Ctrl-C or an error in the script replaces a plan that took minutes by DDP's defaults."""
    _SMALL.save(tmp_path / "plan.json")
    ran = _tune(tmp_path, "name", "2", "fails_in_the_fit")
    assert ran.returncode != 0
    assert CommPlan.load(tmp_path / "plan.json") == _SMALL
    assert ran.stderr.endswith("and no plan was found: plan.json is not written\n")


@pytest.mark.exhaustive
def test_a_command_that_fails_after_a_plan_is_found_keeps_it(tmp_path: Path) -> None:
    """If it fails, a script that expects a whole fit hides the plan that its fit was ended for."""
    ran = _tune(tmp_path, "name", "2", "fails_after_the_fit")
    assert ran.returncode == 4
    assert "plan.json" in ran.stdout
    CommPlan.load(tmp_path / "plan.json")
    assert "commopt: COMMAND ended with status 4, after this plan was found" in ran.stderr


@pytest.mark.exhaustive
def test_a_fit_too_short_to_decide_keeps_the_plan_of_the_script(tmp_path: Path) -> None:
    ran = _tune(tmp_path, "object", "2", "short")
    assert ran.returncode == 0, ran.stderr
    assert CommPlan.load(tmp_path / "plan.json") == CommPlan(gradient_as_bucket_view=True)
    assert "ended before its steps were measured" in ran.stdout


@pytest.mark.exhaustive
def test_a_fit_of_one_rank_is_no_search(tmp_path: Path) -> None:
    """If it fails, a user thinks that a plan was found."""
    ran = _tune(tmp_path, "name", "1")
    assert ran.returncode == 1, ran.stderr
    assert "no fit of COMMAND has looked for a plan" in ran.stderr
    assert not (tmp_path / "plan.json").exists()


def _ran(status: int, leaves: Callable[[Path], object]) -> Any:
    """Runs no command: leaves in the folder of its fits what they would."""

    def run(command: object, change: object, asked: dict[str, Any]) -> tuple[int, bool]:
        leaves(Path(asked["folder"]))
        return status, True

    return patch.object(trainers, "run_changed", run)


def test_a_plan_that_can_no_longer_be_written_is_printed(tmp_path: Path) -> None:
    """If it fails, a full disk loses what minutes of training have found."""
    output = tmp_path / "folder" / "plan.json"
    output.parent.mkdir()

    def leave(folder: Path) -> None:
        found = {"plan": _SMALL.to_json(), "verdict": "Chosen.", "has_decided": True}
        (folder / "found.json").write_text(json.dumps(found))
        output.parent.rmdir()

    with _ran(0, leave):
        printed = commopt("tune", f"--output={output}", "--", "train.py", status=2)
    assert printed.stderr.startswith(f"commopt: [Errno 2] No such file or directory: '{output}'. Chosen. The plan: ")
    assert printed.stderr.endswith(f"{_SMALL.to_json()}\n")


def test_a_node_without_rank_0_says_where_the_plan_is(tmp_path: Path) -> None:
    """If it fails, a tuned job on several nodes fails on all but the first, with a wrong reason."""
    output = tmp_path / "plan.json"
    with _ran(0, lambda folder: (folder / "searched").touch()):
        printed = commopt("tune", f"--output={output}", "--", "torchrun", "train.py")
    assert printed.stdout == "Rank 0 ran on another node: commopt tune has printed and written the plan there.\n"
    assert not output.exists()


def test_a_rank_0_on_another_node_than_the_command_prints_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If it fails, ``commopt tune -- srun ...`` ends with an error on the nodes that it is not on."""
    tuning = Tuning(CommOptDDP(), {"lossy": [], "folder": str(tmp_path / "elsewhere"), "ends_fit": True})
    found = {"verdict": "Chosen.", "num_search_steps": 1, "status": "chosen"}
    with patch.object(FitPlan, "end_fit"), patch.object(tuning, "_tuner", object()):
        with patch.object(tuning, "describe", dict), caplog.at_level("INFO"):
            tuning.end_fit()
        assert not caplog.messages
        with patch.object(tuning, "describe", lambda: found), caplog.at_level("INFO"):
            tuning.end_fit()
    assert caplog.messages == ["commopt tune runs on another node, so it cannot write the plan. Chosen. The plan: {}"]


def test_a_read_only_folder_starts_nothing(tmp_path: Path) -> None:
    """If it fails, a fit is tuned for minutes before the plan turns out to have no place."""
    with patch("os.access", return_value=False):
        line = refusal("tune", f"--output={tmp_path}/plan.json", "--", "there-is-no-such-command")
    assert line.endswith(f"the folder {tmp_path} is read-only for you")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--lossy=int7", "lossy must be .*int7"),
        ("--output=nowhere/plan.json", "there is no folder"),
        ("--output=.", "it is a folder"),
    ],
)
def test_wrong_options_start_nothing(option: str, message: str) -> None:
    assert re.search(message, refusal("tune", option, "--", "there-is-no-such-command"))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fsdp", "commopt tune is for DDP, but the Trainer has strategy='fsdp'"),
        (DDPStrategy(ddp_comm_hook=bf16_compress_hook), "remove ddp_comm_hook from the Trainer's DDPStrategy"),
    ],
)
def test_what_cannot_be_tuned(strategy: Any, message: str) -> None:
    """If it fails, a program is tuned that DDP does not train, or whose hook is lost."""
    with pytest.raises(ValueError, match=message):
        tuned_strategy(strategy, CommOptDDP, {})
