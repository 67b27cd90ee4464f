"""The command ``commopt selftest``: parses, calls and prints."""

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.commands.errors import errors_in_a_line


def selftest(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a device.")] = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Also several buckets, streams, speed, hangs: up to five minutes.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
) -> None:
    """Checks gradient sync on this machine's devices: exactness, equal ranks, resume, memory, measured times.

    Exit status 1 if a check fails, 2 if it cannot run.
    """
    from lightning_commopt.commands.selftest.run import print_selftest, progress_lines, run_selftest

    console = Console()
    with errors_in_a_line(status=2), progress_lines(console) as on_progress:
        on_progress("starting two ranks")
        found = run_selftest(device, on_progress, is_full=full)
        if output is not None:  # before anything is printed, which may fail
            output.write_text(json_text.dumps(found.to_dict(), indent=2), encoding="utf-8")
    print_selftest(found, console)
    if output is not None:
        console.print(f"written to {output}", highlight=False, markup=False)
    raise typer.Exit(found.has_failed)
