"""Runs the command ``commopt``, in this process or in one of its own."""

import sys
from typing import Any, NamedTuple

from typer.testing import CliRunner

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


class Printed(NamedTuple):
    """What a command has printed."""

    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def commopt(*arguments: object, status: int = 0, columns: int = 120, **options: Any) -> Printed:
    """Runs a command, which must end with this exit status, and with no traceback."""
    runner: Any = CliRunner(env={"COLUMNS": str(columns)})
    runner.mix_stderr = False  # click before 8.2 mixes stderr into stdout otherwise; later ones do not read this
    result = runner.invoke(app, [*map(str, arguments)], **options)
    printed = Printed(result.stdout, result.stderr)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == status, printed.output
    return printed


def refusal(*arguments: object, status: int = 2, **options: Any) -> str:
    """Returns the only line that a command prints about a user's mistake."""
    (line,) = commopt(*arguments, status=status, **options).output.splitlines()
    return line


def imported_by(*arguments: str) -> set[str]:
    """Returns the packages, of those that take long, that a command imports."""
    output = run_checked([sys.executable, "-c", _IMPORTED, *arguments])
    return set(output.splitlines()[-1].split()[1:])
