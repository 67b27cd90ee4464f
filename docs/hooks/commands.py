"""The help of every command of ``commopt``, and of ``commopt-train``, as they print it."""

import subprocess
import sys
from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from lightning_commopt.commands.app import app

_WIDTH = {"COLUMNS": "88", "TERMINAL_WIDTH": "88", "NO_COLOR": "1", "TERM": "dumb"}


def markdown(_: Path) -> str:
    """Returns a section for each command."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    names = sorted(group.commands)
    sections = [_section("commopt", _help([]))]
    sections += [_section(f"commopt {name}", _help([name])) for name in names]
    train = [sys.executable, "-c", "from lightning_commopt.train.start import main; main()", "--help"]
    output = subprocess.run(train, check=True, capture_output=True, text=True).stdout
    return "\n".join([*sections, _section("commopt-train", output)])


def _help(arguments: list[str]) -> str:
    result = CliRunner(env=_WIDTH).invoke(app, [*arguments, "--help"], prog_name="commopt")
    if result.exit_code:
        raise RuntimeError(f"commopt {' '.join(arguments)} --help failed: {result.output}")
    return result.output


def _section(name: str, text: str) -> str:
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join([f"## `{name}`", "", "```text", *lines, "```", ""])
