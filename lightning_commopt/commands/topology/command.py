"""The command ``commopt topo``: parses, calls and prints."""

import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.commands.errors import errors_in_a_line


def topo(
    file: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Text of nvidia-smi topo -m, or XML of NCCL_TOPO_DUMP_FILE; - for the input."
        ),
    ] = None,
    source: Annotated[
        str, typer.Option(help="Whom to ask on this machine: nvml, nvidia-smi, or auto for the first that works.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write it as a page, too: one HTML file.")] = None,
) -> None:
    """Says how the GPUs and NICs of a machine are connected, what to expect of that, and what hurts.

    Under torchrun or srun also whether this rank's cores are near its GPU. Exit status 1 if a link is broken, 2 if
    there is no topology to read.
    """
    from lightning_commopt.commands.topology.findings import find_all
    from lightning_commopt.commands.topology.sources import local_rank, read_content, read_file, read_machine
    from lightning_commopt.commands.topology.summary import to_plain
    from lightning_commopt.commands.topology.terminal import print_topology
    from lightning_commopt.text.findings import print_findings

    with errors_in_a_line(status=2):
        if file is None:
            machine = read_machine(source)
        else:
            machine = read_content(sys.stdin.buffer.read(), "input") if str(file) == "-" else read_file(file)
        findings = find_all(machine)
        if file is None and local_rank():
            # All else is what the host's first rank says.
            print_findings([finding for finding in findings if finding.code == "wrong_numa_node"], Console())
            return
        if output is not None:
            from lightning_commopt.commands.topology.terminal import write_page

            write_page(machine, findings, output)
    if json:
        typer.echo(json_text.dumps(to_plain(machine, findings), indent=2))
    else:
        print_topology(machine, findings, Console())
    if output is not None:
        typer.echo(f"page: {output}", err=json)
    raise typer.Exit(any(finding.severity == "error" for finding in findings))
