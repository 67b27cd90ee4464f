"""How commands report a user's mistake."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_in_a_line(status: int = 1) -> Iterator[None]:
    """Prints a user's mistake as one line, and exits with ``status``; other errors keep their traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(status) from None
