"""The commands that this distribution adds to ``commopt``, and what they are without it."""

from pathlib import Path

import pytest

from support.commopt import commopt, imported_by
from support.cross_section import sampled

COMMANDS = ("bench", "doctor", "nccl-log", "nsys", "topo")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage: " in commopt(command, "--help").output


@pytest.mark.parametrize("command", sampled(COMMANDS, by_default=["bench"]))
def test_help_imports_nothing_that_is_slow(command: str) -> None:
    """If it fails, whoever asks what a command does waits for seconds."""
    assert imported_by(command, "--help") == set()


def test_nccl_log_does_not_import_torch(tmp_path: Path) -> None:
    """If it fails, a log on a laptop or a login node takes seconds and a torch to read."""
    (tmp_path / "log").write_text("node-a:1:2 [0] NCCL INFO Connected all rings\n")
    assert imported_by("nccl-log", str(tmp_path / "log")) == set()
