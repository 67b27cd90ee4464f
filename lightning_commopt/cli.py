"""The console command ``commopt``: one function for each command, which parses, calls and prints.

A command imports what it needs when it runs: torch takes seconds to import, and most commands do without.
"""

import json as json_text
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_commopt.cli_bench import bench
from lightning_commopt.formatting import count

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tools around lightning_commopt. Training is commopt-train.",
)


@app.callback()
def _main() -> None:
    # With a callback typer keeps the command's name even while there is one command only.
    pass


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prints versions, devices, backends, comm hooks, which DDP options this torch has, and which faults to mend."""
    from lightning_commopt.runs.info import collect
    from lightning_commopt.runs.info_terminal import print_info

    found = collect()
    if json:
        typer.echo(json_text.dumps(found.to_dict(), indent=2))
        return
    print_info(found, Console())


@app.command()
def selftest(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a device.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
) -> None:
    """Checks gradient sync on this machine's devices: exactness, equal ranks, resume, memory, measured times.

    Exit status 1 if a check fails, 2 if it cannot run.
    """
    from lightning_commopt.selftest.run import run_selftest
    from lightning_commopt.selftest.terminal import print_selftest

    console = Console()
    with _errors_in_a_line(status=2), console.status("starting two ranks") as status:
        found = run_selftest(device, lambda name: status.update(name))
    print_selftest(found, console)
    if output is not None:
        output.write_text(json_text.dumps(found.to_dict(), indent=2), encoding="utf-8")
        console.print(f"written to {output}", highlight=False)
    raise typer.Exit(found.has_failed)


@app.command()
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
        with _errors_in_a_line(status=2):
            if hosts is not None or port is not None:
                raise ValueError("--hosts and --port are for checks before a run: leave them out with RUN_DIR")
        _explain_hang(run_dir, json=json)
        return
    from lightning_commopt.doctor.facts import collect_facts
    from lightning_commopt.doctor.findings import find
    from lightning_commopt.doctor.meeting import Meeting, MeetingError, meet
    from lightning_commopt.doctor.places import find_place
    from lightning_commopt.doctor.terminal import print_findings

    with _errors_in_a_line(status=2):
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
        plain = {"ranks": [asdict(each) for each in met.everybody], "findings": [each._asdict() for each in found]}
        typer.echo(json_text.dumps(plain, indent=2))
    elif facts.rank == 0:
        print_findings(found, met.everybody, Console())
    raise typer.Exit(any(each.severity == "error" for each in found))


@app.command()
def trace(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory that has comm_time, where CommTimeMonitor saved its steps.")
    ],
    output: Annotated[Path | None, typer.Option(help="The file; by default comm_time/trace.json in RUN_DIR.")] = None,
    first_step: Annotated[
        int | None, typer.Option(min=0, help="Where to begin; by default at the first step that was saved.")
    ] = None,
    num_steps: Annotated[int, typer.Option(min=1, help="Steps from there on.")] = 100,
) -> None:
    """Writes a trace of the steps of all ranks, for https://ui.perfetto.dev or chrome://tracing."""
    from lightning_commopt.measure.trace import write_trace

    with _errors_in_a_line():
        written = write_trace(run_dir, output, first_step, num_steps)
    for notice in written.notices:
        typer.echo(f"commopt: {notice}", err=True)
    typer.echo(
        f"{written.path}: steps {written.first_step} to {written.last_step} of {count(written.num_ranks, 'rank')};"
        f" {count(written.num_steps_recorded, 'step')} saved. Open it in https://ui.perfetto.dev"
    )


@app.command()
def summary(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory that has comm_time, where CommTimeMonitor saved its steps.")
    ],
    num_warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="First steps to leave out; by default as many as CommTimeMonitor did.")
    ] = None,
) -> None:
    """Prints what a step spent its time on, and what is worth trying: the table at the end of a fit, from its files.

    Exit status 2 if RUN_DIR has no steps.
    """
    from lightning_commopt.measure.summary import summarize_run

    with _errors_in_a_line(status=2):
        found, notices = summarize_run(run_dir, num_warmup_steps)
    for notice in notices:
        typer.echo(f"commopt: {notice}", err=True)
    Console().print(found.table())


@app.command(context_settings={"allow_interspersed_args": False})
def nsys(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Starts one rank, such as python train.py; or begins with torchrun."),
    ],
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine; by default one for each CUDA device, at least 1.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where the reports go, as rank_<rank>.nsys-rep.")] = Path("nsys"),
    print_only: Annotated[bool, typer.Option("--print", help="Print the shell command, and run nothing.")] = False,
    nsys_args: Annotated[
        str, typer.Option(help="Further options of nsys profile, as in a shell; they replace ours of the same name.")
    ] = "",
) -> None:
    """Runs COMMAND on every rank under Nsight Systems, from cudaProfilerStart to cudaProfilerStop.

    Traces CUDA, NVTX, the system's calls and, where this nsys can, NCCL; --nsys-args=--trace=cuda,nvtx for less.
    Several windows: --nsys-args=--capture-range-end=repeat:2.
    """
    from lightning_commopt.launch import nsys as nsight

    with _errors_in_a_line():
        ranks = nsight.nsys_command(command, nproc_per_node=nproc_per_node, output_dir=output_dir, nsys_args=nsys_args)
        if print_only:
            typer.echo(shlex.join(ranks))
            return
        nsight.make_ready(output_dir, nsys_args)
        status = nsight.run(ranks)
    reports = ", ".join(map(str, nsight.reports(output_dir)))
    typer.echo(f"commopt: reports: {reports}" if reports else f"commopt: {nsight.NO_REPORTS}", err=True)
    raise typer.Exit(status)


@app.command()
def report(
    dirs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of sweeps, with runs at any depth, or of runs.")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and write only files that --output or --csv names.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="The CSV file; by default report.csv beside the page.")] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Setting that the speed-ups are over, as the table calls it.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.html and report.csv, or the page itself; by default the first DIR that exists."
        ),
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(help="Earlier sweep, or the output of --json for it: list what is slower now beyond noise."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the throughput that a setting may lose since --earlier.")
    ] = 0.05,
) -> None:
    """Says which plan is fastest, by how much and at what loss: on the terminal, as report.html and report.csv.

    Exit status 1 if --earlier finds something that has become slower, or failed; 2 for mistakes in the arguments.
    """
    from lightning_commopt.report.build import build_report
    from lightning_commopt.report.files import write_files
    from lightning_commopt.report.outputs import finite, to_plain, write_csv
    from lightning_commopt.report.regressions import find_regressions
    from lightning_commopt.report.terminal import print_regressions, print_report

    with _errors_in_a_line(status=2):
        found = build_report(dirs, baseline=baseline)
        plain = to_plain(found)
        regressions = None if earlier is None else find_regressions(plain, earlier, tolerance=tolerance)
        if json:
            whole = plain if regressions is None else {**plain, "regressions": finite(regressions.to_plain())}
            typer.echo(json_text.dumps(whole, indent=2, allow_nan=False))
        else:
            console = Console()
            print_report(found, console)
            if regressions is not None:
                print_regressions(regressions, console)
        if output is not None or not json:
            beside = next(folder for folder in dirs if folder.is_dir())
            page, table = write_files(found, output or beside, csv)
            typer.echo(f"report: {page} and {table}", err=json)
        elif csv is not None:
            write_csv(found, csv)
    raise typer.Exit(1 if regressions is not None and regressions.is_worse else 0)


@app.command()
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

    with _errors_in_a_line(status=2):
        log = read_log(files)
    findings = find_all(log)
    if json:
        typer.echo(json_text.dumps(to_plain(log, findings), indent=2))
    else:
        print_log(log, findings, Console())


@app.command()
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
    from lightning_commopt.links.topology.findings import find_all
    from lightning_commopt.links.topology.sources import local_rank, read_content, read_file, read_machine
    from lightning_commopt.links.topology.summary import to_plain
    from lightning_commopt.links.topology.terminal import print_findings, print_topology

    with _errors_in_a_line(status=2):
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


def _explain_hang(run_dir: Path, *, json: bool) -> None:
    from lightning_commopt.hangs.reading import read_left_behind
    from lightning_commopt.hangs.terminal import print_left_behind

    with _errors_in_a_line(status=2):
        found = read_left_behind(run_dir)
    if json:
        plain = {"was_reported": found.was_reported, "time_unix_s": found.at_unix_s}
        snapshots = [each.to_plain() for each in found.snapshots]
        typer.echo(json_text.dumps(plain | found.diagnosis.to_plain() | {"snapshots": snapshots}, indent=2))
    else:
        print_left_behind(found, Console())


@contextmanager
def _errors_in_a_line(status: int = 1) -> Iterator[None]:
    """Turns a user's mistake into one line and an exit status; other errors keep their traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(status) from None


app.command()(_errors_in_a_line(status=2)(bench))
