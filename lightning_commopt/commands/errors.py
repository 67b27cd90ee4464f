"""What commands share: the option ``--json``, and how they report a user's mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@contextmanager
def errors_in_a_line(*others: type[Exception], status: int = 1) -> Iterator[None]:
    """Prints a user's mistake, or one of ``others``, and exits with ``status``; other errors keep their traceback."""
    mistakes: tuple[type[Exception], ...] = (OSError, ValueError, *others)
    try:
        yield
    except mistakes as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(status) from None


def check_outputs(*paths: Path | None) -> None:
    """Checks that files can be written, before what takes minutes.

    Raises:
        ValueError: one is a folder, or in a folder that does not exist.
    """
    for path in paths:
        if path is not None and path.is_dir():
            raise ValueError(f"{path} cannot be written: it is a folder, and must be a file")
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
