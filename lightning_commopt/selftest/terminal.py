"""The outcome of the self-test on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_commopt.selftest.run import SelfTest

_COLORS = {"passed": "green", "failed": "red", "not checked": "yellow"}


def print_selftest(found: SelfTest, console: Console) -> None:
    """Prints a row for each check, and where ranks could not run."""
    table = Table(found.place, "", "", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for outcome in found.outcomes:
        table.add_row(outcome.name, f"[{_COLORS[outcome.status]}]{outcome.status}[/]", outcome.detail)
    console.print(table)
    for place, why in found.refused.items():
        console.print(f"{place}: refused ({why})", highlight=False)
