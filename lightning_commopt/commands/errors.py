"""Shared by all commands: panels of the help, the option ``--json``, printing, and reports of a user's mistake."""

import json as json_text
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_commopt.text.formatting import escape_controls

BEFORE, DURING, AFTER = "Before a run", "During a run", "After a run"
"""The panels of the help, as ``rich_help_panel`` of a command."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def echo(text: str, *, err: bool = False) -> None:
    """Prints text, on standard error with ``err``; it may quote files, so control characters become escapes."""
    typer.echo(escape_controls(text), err=err)


def echo_notices(run_dir: Path) -> None:
    """Prints, on standard error, what a run's records of steps lack; nothing if the run has none."""
    from lightning_commopt.measure.files import notices, read_run

    try:
        lines = notices(read_run(run_dir))
    except FileNotFoundError:
        return
    except ValueError as error:
        lines = [str(error)]
    for line in lines:
        echo(f"commopt: {line}", err=True)


def print_json(value: Any, *, allow_nan: bool = True) -> None:
    """Prints a value as JSON, in ASCII without control characters."""
    typer.echo(json_text.dumps(value, indent=2, allow_nan=allow_nan).replace("\x7f", "\\u007f"))


@contextmanager
def errors_in_a_line(*others: type[Exception]) -> Iterator[None]:
    """Prints a user's mistake, or one of ``others``, and exits with 2 as for a wrong option; other errors are raised.

    Exit status 1 is reserved for commands that could run, and have found something wrong. Typer silently ends a command
    whose output nobody reads any longer, as in ``commopt report DIR | head``.
    """
    mistakes: tuple[type[Exception], ...] = (OSError, ValueError, *others)
    try:
        yield
    except BrokenPipeError:
        raise
    except mistakes as error:
        echo(f"commopt: {error}", err=True)
        raise typer.Exit(2) from None


def check_outputs(*paths: Path | None) -> None:
    """Checks that files can be written, before a command runs for minutes.

    Raises:
        ValueError: one is a folder, or in a folder that does not exist or cannot be written to.
    """
    for path in filter(None, paths):
        folder = path.absolute().parent
        is_special = path.exists() and not path.is_file()  # such as /dev/stdout
        if path.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder, and must be a file")
        if not folder.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {folder}")
        if not is_special and not os.access(folder, os.W_OK):
            raise ValueError(f"{path} cannot be written: the folder {folder} is read-only for you")
