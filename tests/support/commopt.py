"""Runs the command ``commopt`` in this process."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from lightning_commopt.commands.app import app


def commopt(*arguments: object, status: int = 0, columns: int = 120, **options: Any) -> Result:
    """Runs a command, which must end with this exit status, and with no traceback."""
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [*map(str, arguments)], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == status, result.output
    return result


def refusal(*arguments: object, status: int = 2) -> str:
    """Returns the only line that a command prints about a user's mistake."""
    (line,) = commopt(*arguments, status=status).output.splitlines()
    return line


def is_documented(page: str, command: str, output: str) -> bool:
    """Returns whether a page of the docs shows a command with this output."""
    lines = [f"$ {command}", *output.splitlines()]
    block = "\n".join(f"    {line}".rstrip() for line in lines)
    return block in (Path(__file__).parents[2] / "docs" / page).read_text()
