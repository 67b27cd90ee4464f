"""The command ``commopt nccl-log``: parses, calls and prints."""

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.commands.errors import errors_in_a_line


def nccl_log(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Logs of NCCL_DEBUG=INFO, one for each rank or all in one; - is standard input."
        ),
    ],
    run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Match the Inspector's records with this run's buckets.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Says how the ranks of a job talk, what is slow, wrong or unequal, and which setting or hardware is behind it.

    Files may be cut, mixed, compressed, and of NCCL 2.2 to 2.30, and those of NCCL's Inspector may be among them. Exit
    status 2 if there is no line of NCCL in them.
    """
    from lightning_commopt.commands.nccl_log.findings import find_all
    from lightning_commopt.commands.nccl_log.reader import read_log
    from lightning_commopt.commands.nccl_log.summary import to_plain
    from lightning_commopt.commands.nccl_log.terminal import print_log

    with errors_in_a_line(status=2):
        log = read_log(files, keeps_order=run is not None)
        if run is not None:
            from lightning_commopt.commands.nccl_log.run_match import match_run
            from lightning_commopt.measure.files import read_run

            log.matched, unmatched = match_run(log.inspected, read_run(run))
            for problem in unmatched:
                typer.echo(f"commopt: {run}: {problem}", err=True)
    findings = find_all(log)
    if json:
        typer.echo(json_text.dumps(to_plain(log, findings), indent=2))
    else:
        print_log(log, findings, Console())
