"""``commopt run`` over scripts that know nothing of this package."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from omegaconf import ListConfig

from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, SpeedMonitor
from lightning_commopt.commands import trainers
from lightning_commopt.commands.monitored import CHANGE, add_monitors
from lightning_commopt.commands.trainers import VARIABLE, _change_trainer
from support.commopt import refusal
from support.lightnings import Trainer

_SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    quiet = dict.fromkeys(("enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel())
    print("trained with", type(trainer.strategy).__name__)
"""


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from lightning_commopt.commands.app import app; app()"]
    return subprocess.run(
        [*program, "run", "--", *command], capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )


@pytest.mark.exhaustive
def test_a_script_is_measured_as_it_is(tmp_path: Path) -> None:
    """If it fails, whoever wants to know what a job waits for must change its script."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    ran = _run(tmp_path, sys.executable, "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "trained with DDPStrategy" in ran.stdout
    assert "exposed_share" in ran.stdout  # in the progress bar
    assert "Time of a step, over 22 steps and 2 ranks" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "To keep the monitors: Trainer(callbacks=[CommTimeMonitor(), HangMonitor()])"
    assert list(tmp_path.rglob("prediction.json"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "status"), [("pass", 1), ("raise SystemExit(3)", 3)])
def test_a_program_without_a_trainer(program: str, status: int, tmp_path: Path) -> None:
    """If it fails, a user waits for a table that never comes, or a launcher takes a failure for success."""
    ran = _run(tmp_path, sys.executable, "-c", program)
    assert ran.returncode == status
    assert "COMMAND has made no Trainer" in ran.stderr
    assert not ran.stdout


def test_a_rank_on_another_node_is_changed(tmp_path: Path) -> None:
    """If it fails, ranks that srun starts on other nodes have no monitors, and the others wait for them forever."""
    hide = f"rm -r {tmp_path}/commopt-*"  # another node has no such folder
    program = f"import sys; sys.exit({trainers.__name__!r} not in sys.modules)"
    with patch.object(tempfile, "tempdir", str(tmp_path)):
        command = ["sh", "-c", f'{hide} && exec "$@"', "sh", sys.executable, "-c", program]
        assert trainers.run_changed(command, CHANGE, {}) == (0, False)


def test_a_command_that_is_not_there() -> None:
    assert refusal("run", "--", "there-is-no-such-command").startswith("commopt: COMMAND cannot be started: ")
    assert "; for a script, write python no_such.py" in refusal("run", "no_such.py")


def test_variables_of_the_environment_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, a script whose Trainer is set by PL_TRAINER_* trains with Lightning's defaults instead."""
    own = type("Trainer", (Trainer,), {})  # the variables have the name of the class
    module = ModuleType(Trainer.__module__)
    module.Trainer = own  # type: ignore[attr-defined]
    monkeypatch.setenv(VARIABLE, json.dumps({"change": CHANGE, "options": {}, "note": str(tmp_path / "made")}))
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "8")
    _change_trainer(module)
    made = own(accelerator="cpu", logger=False, max_epochs=9)
    assert (made.max_steps, made.max_epochs) == (7, 9)
    assert any(isinstance(callback, CommTimeMonitor) for callback in made.callbacks)


_OF_HYDRA = ListConfig([SpeedMonitor()], flags={"allow_objects": True})


@pytest.mark.parametrize(
    "given", [None, [], SpeedMonitor(), _OF_HYDRA, [SpeedMonitor(), CommTimeMonitor(every_n_steps=7)]]
)
def test_a_trainers_own_callbacks_stay(given: Any) -> None:
    """If it fails, a script loses a callback, or has a monitor twice."""
    arguments = {"callbacks": given}
    add_monitors("lightning.pytorch", arguments, {})
    callbacks = arguments["callbacks"]
    own = [given] if isinstance(given, SpeedMonitor) else list(given or ())
    assert callbacks[: len(own)] == own
    assert sorted(type(callback).__name__ for callback in callbacks if not isinstance(callback, SpeedMonitor)) == [
        CommTimeMonitor.__name__,
        HangMonitor.__name__,
    ]
