"""The command ``commopt predict``: parses, calls and prints."""

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.commands.errors import errors_in_a_line


def predict(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run with CommTimeMonitor; it has comm_time.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default as many as trained.")] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Of each rank's link, such as 25gbit or 500mbit; by default that of the run."
        ),
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Batches to accumulate for a step; by default as many as the run did.")
    ] = None,
    comm_hook: Annotated[
        list[str] | None,
        typer.Option(help="A compressor by name, again for more; by default those that are recommended."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Predicts the time of a step under other plans, and on machines that you do not have, from the records of a run.

    Exit status 2 for mistakes in the arguments, or if RUN_DIR does not show enough.
    """
    from lightning_commopt.commands.predict.outlook import outlook

    with errors_in_a_line(status=2):
        found = outlook(run_dir, num_ranks=ranks, link=link, num_batches=accumulate, comm_hooks=comm_hook)
    if json:
        typer.echo(json_text.dumps(found.to_plain(), indent=2))
    else:
        Console().print(found.table())
