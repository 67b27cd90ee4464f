"""What the doctor finds, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.doctor.findings import Finding


def print_findings(found: Sequence[Finding], everybody: Sequence[Facts], console: Console) -> None:
    """Prints findings with what to do, the worst first."""
    hosts = len({facts.host for facts in everybody})
    console.print(f"{len(everybody)} rank(s) on {hosts} host(s)", highlight=False)
    if not found:
        console.print("Nothing is wrong as far as can be seen before a run.")
        return
    console.print("Fix this first:" if found[0].severity == "error" else "Nothing must be fixed. It may be worth it:")
    for number, each in enumerate(found, start=1):
        color = "red" if each.severity == "error" else "yellow"
        console.print(
            f"{number}. [{color}]{each.severity}[/] {escape(f'{each.where}: {each.message}.')}", highlight=False
        )
        console.print(f"   {escape(each.remedy)}", highlight=False)
