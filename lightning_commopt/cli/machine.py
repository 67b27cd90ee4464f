"""Commands about a machine, or several: whether training can run there, and why it stands still."""

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.cli.errors import errors_in_a_line


def info(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    from lightning_commopt.runs.info import collect
    from lightning_commopt.runs.info_terminal import print_info

    found = collect()
    if json:
        typer.echo(json_text.dumps(found.to_dict(), indent=2))
        return
    print_info(found, Console())


def selftest(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a device.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
) -> None:
    """Checks gradient sync on this machine's devices: exactness, equal ranks, resume, memory, measured times.

    Exit status 1 if a check fails, 2 if it cannot run.
    """
    from lightning_commopt.selftest.run import run_selftest
    from lightning_commopt.selftest.terminal import print_selftest, progress_lines

    console = Console()
    with errors_in_a_line(status=2), progress_lines(console) as on_progress:
        on_progress("starting two ranks")
        found = run_selftest(device, on_progress)
    print_selftest(found, console)
    if output is not None:
        output.write_text(json_text.dumps(found.to_dict(), indent=2), encoding="utf-8")
        console.print(f"written to {output}", highlight=False)
    raise typer.Exit(found.has_failed)


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Directory where HangMonitor left its files: says why that run hung.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Hosts that each run this with the same list; they meet on the first."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Where they meet; by default the launcher's, or 29511 with --hosts."),
    ] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds in which ranks must meet.")] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a list.")] = False,
) -> None:
    """Says what may keep training from running, here or on several hosts; with RUN_DIR, why that run hung.

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
    from lightning_commopt.doctor.facts import collect_facts
    from lightning_commopt.doctor.findings import find
    from lightning_commopt.doctor.meeting import Meeting, MeetingError, meet
    from lightning_commopt.doctor.places import find_place
    from lightning_commopt.doctor.terminal import print_findings

    with errors_in_a_line(status=2):
        place = find_place(hosts, port)
        if place is None and port is not None:
            raise ValueError("--port is where several hosts meet: give --hosts as well, or use torchrun or srun")
    facts = collect_facts(place=place)
    try:
        met = Meeting([facts], []) if place is None else meet(facts, place, limit_s=limit_s)
    except MeetingError as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(2) from None
    found = find(*met)
    if facts.rank == 0 and json:
        plain = {"ranks": [asdict(each) for each in met.everybody], "findings": [each.to_plain() for each in found]}
        typer.echo(json_text.dumps(plain, indent=2))
    elif facts.rank == 0:
        print_findings(found, met.everybody, Console())
    raise typer.Exit(any(each.severity == "error" for each in found))


def _explain_hang(run_dir: Path, *, json: bool) -> None:
    from lightning_commopt.watch.hangs.reading import read_left_behind
    from lightning_commopt.watch.hangs.terminal import print_left_behind

    with errors_in_a_line(status=2):
        found = read_left_behind(run_dir)
    if json:
        plain = {"was_reported": found.was_reported, "time_unix_s": found.at_unix_s}
        snapshots = [each.to_plain() for each in found.snapshots]
        typer.echo(json_text.dumps(plain | found.diagnosis.to_plain() | {"snapshots": snapshots}, indent=2))
    else:
        print_left_behind(found, Console())
