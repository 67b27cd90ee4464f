"""The outcome of the self-test on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from lightning_commopt.commands.selftest.run import SelfTest
from lightning_commopt.text.terminal import TextTable

_COLORS = {"passed": "green", "failed": "red", "not checked": "yellow"}


@contextmanager
def progress_lines(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is running: one line that changes on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield lambda text: print(f"running: {text}", file=console.file, flush=True)
        return
    with console.status("", spinner="line") as status:
        yield status.update


def print_selftest(found: SelfTest, console: Console) -> None:
    """Prints a row for each check, and where ranks could not run."""
    table = TextTable(found.place, "", "")
    for outcome in found.outcomes:
        table.add_row(outcome.name, Text(outcome.status, _COLORS[outcome.status]), outcome.detail)
    console.print(table)
    for place, why in found.refused.items():
        console.print(f"{place}: refused ({why})", highlight=False)
