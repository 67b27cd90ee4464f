"""Commands about what connects ranks."""

import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.cli.errors import errors_in_a_line


def nccl_log(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Logs of NCCL_DEBUG=INFO: one for each rank, or all ranks in one."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Says how the ranks of a job talk, what is slow, wrong or unequal, and which setting or hardware is behind it.

    Files may be cut, mixed, and of NCCL 2.4 to 2.30. Exit status 2 if there is no line of NCCL in them.
    """
    from lightning_commopt.links.nccl_log.findings import find_all
    from lightning_commopt.links.nccl_log.reader import read_log
    from lightning_commopt.links.nccl_log.summary import to_plain
    from lightning_commopt.links.nccl_log.terminal import print_log

    with errors_in_a_line(status=2):
        log = read_log(files)
    findings = find_all(log)
    if json:
        typer.echo(json_text.dumps(to_plain(log, findings), indent=2))
    else:
        print_log(log, findings, Console())


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
    from lightning_commopt.findings import print_findings
    from lightning_commopt.links.topology.findings import find_all
    from lightning_commopt.links.topology.sources import local_rank, read_content, read_file, read_machine
    from lightning_commopt.links.topology.summary import to_plain
    from lightning_commopt.links.topology.terminal import print_topology

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
            from lightning_commopt.links.topology.page import write_page

            write_page(machine, findings, output)
    if json:
        typer.echo(json_text.dumps(to_plain(machine, findings), indent=2))
    else:
        print_topology(machine, findings, Console())
    if output is not None:
        typer.echo(f"page: {output}", err=json)
    raise typer.Exit(any(finding.severity == "error" for finding in findings))
