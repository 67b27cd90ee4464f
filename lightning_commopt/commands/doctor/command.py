"""The command ``commopt doctor``: parses, calls and prints."""

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.commands.errors import errors_in_a_line


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Directory with the files of HangMonitor: explains why that run hung.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Hosts that all run this command with the same list, and meet on the first."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port to meet at; by default the launcher's, or 29511 with --hosts."),
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds in which ranks must meet.")] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a list.")] = False,
) -> None:
    """Reports what may keep training from running, here or on several hosts; with RUN_DIR, why that run hung.

    On several hosts under torchrun or srun, or with --hosts on each.

    Compares versions, devices and variables of all ranks; tries connections between all hosts; looks at packages,
    NCCL's variables, shared memory, cores, names, interfaces, InfiniBand and the links between GPUs. Exit status 1 if
    there is an error, 2 if the ranks do not meet.
    """
    if run_dir is not None:
        with errors_in_a_line(status=2):
            if hosts is not None or port is not None:
                raise ValueError("--hosts and --port are for checks before a run: leave them out with RUN_DIR")
        _explain_hang(run_dir, json=json)
        return
    from lightning_commopt.commands.doctor.facts import collect_facts
    from lightning_commopt.commands.doctor.findings import find
    from lightning_commopt.commands.doctor.meeting import Meeting, MeetingError, meet
    from lightning_commopt.commands.doctor.terminal import print_findings
    from lightning_commopt.launch.rank_identity import find_rank_identity

    with errors_in_a_line(status=2):
        identity = find_rank_identity(hosts, port)
        if identity is None and port is not None:
            raise ValueError("--port is where several hosts meet: give --hosts as well, or use torchrun or srun")
    facts = collect_facts(identity=identity)
    try:
        met = Meeting([facts], []) if identity is None else meet(facts, identity, limit_s=limit_s)
    except MeetingError as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(2) from None
    found = find(*met)
    if facts.rank == 0 and json:
        ranks = [asdict(rank_facts) for rank_facts in met.everybody]
        plain = {"ranks": ranks, "findings": [finding.to_plain() for finding in found]}
        typer.echo(json_text.dumps(plain, indent=2))
    elif facts.rank == 0:
        print_findings(found, met.everybody, Console())
    raise typer.Exit(any(finding.severity == "error" for finding in found))


def _explain_hang(run_dir: Path, *, json: bool) -> None:
    from lightning_commopt.commands.doctor.terminal import print_hang_report
    from lightning_commopt.watch.hangs.records import read_hang_report

    with errors_in_a_line(status=2):
        found = read_hang_report(run_dir)
    if json:
        plain = {"was_reported": found.was_reported, "time_unix_s": found.at_unix_s}
        snapshots = [snapshot.to_plain() for snapshot in found.snapshots]
        typer.echo(json_text.dumps(plain | asdict(found.diagnosis) | {"snapshots": snapshots}, indent=2))
    else:
        print_hang_report(found, Console())
