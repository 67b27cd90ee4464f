"""Runs the command ``commopt``, in this process or in one of its own."""

import sys
from typing import Any

from typer.testing import CliRunner, Result

from lightning_commopt.commands.app import app
from support.wheels import run_checked

_IMPORTED = """
import sys
from lightning_commopt.commands.app import app
try:
    app(sys.argv[1:])
finally:
    print("imported", *{"torch", "lightning", "hydra", "scipy", "jinja2", "numpy"}.intersection(sys.modules))
"""


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


def imported_by(*arguments: str) -> set[str]:
    """Returns the packages, of those that take long, that a command imports."""
    output = run_checked([sys.executable, "-c", _IMPORTED, *arguments])
    return set(output.splitlines()[-1].split()[1:])
