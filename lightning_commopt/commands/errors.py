"""How commands tell a user's mistake."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def errors_in_a_line(status: int = 1) -> Iterator[None]:
    """Turns a user's mistake into one line and an exit status; other errors keep their traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(status) from None
