"""The command ``commopt info``: parses, calls and prints."""

import json as json_text
from typing import Annotated

import typer
from rich.console import Console


def info(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    from lightning_commopt.commands.info.info import collect, print_info

    found = collect()
    if json:
        typer.echo(json_text.dumps(found.to_dict(), indent=2))
        return
    print_info(found, Console())
