"""The commands that ``commopt`` gets from this distribution, by its entry point; each parses, calls and prints."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from commopt_diagnose.bench.command import bench
from lightning_commopt.commands.errors import (
    AFTER,
    BEFORE,
    DURING,
    Json,
    check_outputs,
    echo,
    echo_notices,
    errors_in_a_line,
    print_json,
)
from lightning_commopt.commands.run_dirs import newest_run
from lightning_commopt.text.terminal import TextConsole

app = typer.Typer()
app.command(rich_help_panel=BEFORE, epilog="Example: commopt bench all_reduce all_gather -e 64M --comm-hook int8")(
    errors_in_a_line()(bench)
)


@app.command(rich_help_panel=BEFORE, epilog="Example: commopt doctor --hosts node1,node2")
def doctor(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Directory of a run with HangMonitor, or one above it: explains why the newest run hung."),
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
    json: Json = False,
) -> None:
    """Reports what may keep training from running, here or on several hosts; with RUN_DIR, why that run hung.

    On several hosts under torchrun or srun, or with --hosts on each.

    Compares versions, devices and variables of all ranks; tries connections between all hosts; looks at packages,
    NCCL's variables, shared memory, cores, names, interfaces, InfiniBand and the links between GPUs. Exit status 1 if
    there is an error, 2 if the ranks do not meet.
    """
    if run_dir is not None:
        with errors_in_a_line():
            if hosts is not None or port is not None:
                raise ValueError("--hosts and --port are for checks before a run: leave them out with RUN_DIR")
        _explain_hang(run_dir, json=json)
        return
    from commopt_diagnose.doctor.facts import collect_facts
    from commopt_diagnose.doctor.findings import find
    from commopt_diagnose.doctor.meeting import Meeting, MeetingError, meet
    from commopt_diagnose.doctor.terminal import print_findings
    from commopt_diagnose.rank_identity import find_rank_identity

    with errors_in_a_line():
        identity = find_rank_identity(hosts, port)
        if identity is None and port is not None:
            raise ValueError("--port is where several hosts meet: give --hosts as well, or use torchrun or srun")
    facts = collect_facts(identity=identity)
    with errors_in_a_line(MeetingError):
        met = Meeting([facts], []) if identity is None else meet(facts, identity, limit_s=limit_s)
    findings = find(*met)
    if facts.rank == 0 and json:
        ranks = [asdict(rank_facts) for rank_facts in met.all_facts]
        plain = {"ranks": ranks, "findings": [finding.to_plain() for finding in findings]}
        print_json(plain)
    elif facts.rank == 0:
        print_findings(findings, met.all_facts, TextConsole())
    raise typer.Exit(any(finding.severity == "error" for finding in findings))


def _explain_hang(run_dir: Path, *, json: bool) -> None:
    from commopt_diagnose.doctor.terminal import print_hang_report
    from lightning_commopt.watch.hangs.records import read_hang_report

    with errors_in_a_line():
        report = read_hang_report(newest_run(run_dir, "hangs/*", "rank_0.json"))
    if json:
        plain = {
            "was_reported": report.was_reported,
            "time_unix_s": report.at_unix_s,
            "problems": list(report.problems),
        }
        snapshots = [snapshot.to_plain() for snapshot in report.snapshots]
        print_json(plain | asdict(report.diagnosis) | {"snapshots": snapshots})
    else:
        print_hang_report(report, TextConsole())


@app.command(
    rich_help_panel=AFTER, epilog="Example: NCCL_DEBUG=INFO python train.py > log.txt 2>&1; commopt nccl-log log.txt"
)
def nccl_log(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Logs of NCCL_DEBUG=INFO of all ranks; - is standard input.")
    ],
    run: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Match the Inspector's records with this run's buckets.")
    ] = None,
    json: Json = False,
) -> None:
    """Reports how the ranks of a job talk, what is slow, wrong or unequal, and which setting or hardware is behind it.

    Files may be cut, mixed or compressed, and from NCCL 2.2 to 2.30. Files of NCCL's Inspector may be among them. Exit
    status 2 if no line is NCCL's.
    """
    from commopt_diagnose.nccl_log.findings import find_all
    from commopt_diagnose.nccl_log.reader import read_log
    from commopt_diagnose.nccl_log.summary import to_plain
    from commopt_diagnose.nccl_log.terminal import print_log

    with errors_in_a_line():
        log = read_log(files, keeps_order=run is not None)
        if run is not None:
            from commopt_diagnose.nccl_log.inspector import match_run
            from lightning_commopt.measure.files import read_run

            log.matched, unmatched = match_run(log.inspected, read_run(run))
            echo_notices(run)
            for problem in unmatched:
                echo(f"commopt: {run}: {problem}", err=True)
    findings = find_all(log)
    if json:
        print_json(to_plain(log, findings))
    else:
        print_log(log, findings, TextConsole())


@app.command(rich_help_panel=BEFORE, epilog="Example: nvidia-smi topo -m > topo.txt; commopt topo topo.txt")
def topo(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Text of nvidia-smi topo -m or rocm-smi --showtopo, or XML of NCCL; - is the input. By default, this"
            " machine's.",
        ),
    ] = None,
    from_file: Annotated[Path | None, typer.Option("--from", metavar="FILE", help="The same as FILE.")] = None,
    source: Annotated[
        str, typer.Option(help="Where to read this machine's: nvml, nvidia-smi, or auto for the first that works.")
    ] = "auto",
    json: Json = False,
    output: Annotated[Path | None, typer.Option(help="Write it as a page, too: one HTML file.")] = None,
) -> None:
    """Reports how the GPUs and NICs of a machine are connected, what to expect of that, and what is slow.

    Under torchrun or srun also whether this rank's cores are near its GPU. Exit status 1 if a link is broken, 2 if
    there is no topology to read.
    """
    from commopt_diagnose.findings import print_findings
    from commopt_diagnose.topology.findings import find_all
    from commopt_diagnose.topology.sources import local_rank, read_file, read_machine
    from commopt_diagnose.topology.terminal import print_topology, to_plain, write_page

    with errors_in_a_line():
        if file is not None and from_file is not None:
            raise ValueError(f"FILE {file} and --from {from_file} are two sources: give one of them")
        file = from_file if file is None else file
        if file is not None and source != "auto":
            raise ValueError(f"--source {source} is for this machine: leave it out with {file}")
        check_outputs(output)
        machine = read_machine(source) if file is None else read_file(file)
        findings = find_all(machine)
        if file is None and local_rank():
            # The host's first rank prints all other findings.
            print_findings([finding for finding in findings if finding.code == "wrong_numa_node"], TextConsole())
            return
        if output is not None:
            write_page(machine, findings, output)
    if json:
        print_json(to_plain(machine, findings))
    else:
        print_topology(machine, findings, TextConsole())
    if output is not None:
        echo(f"page: {output}", err=json)
    raise typer.Exit(any(finding.severity == "error" for finding in findings))


@app.command(
    rich_help_panel=DURING,
    epilog="Example: commopt nsys --nproc-per-node 8 -- python train.py",
    context_settings={"allow_interspersed_args": False},
)
def nsys(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Command of one rank, such as python train.py; or torchrun ..."),
    ],
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine; by default one for each CUDA device, at least 1.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Directory of the reports, rank_<rank>.nsys-rep.")] = Path("nsys"),
    print_only: Annotated[bool, typer.Option("--print", help="Print the shell command without running it.")] = False,
    nsys_args: Annotated[
        str, typer.Option(help="Further options of nsys profile, as in a shell; they replace ours of the same name.")
    ] = "",
) -> None:
    """Runs COMMAND on every rank under Nsight Systems, from cudaProfilerStart to cudaProfilerStop.

    Traces CUDA, NVTX, the system's calls and, where this nsys can, NCCL; --nsys-args=--trace=cuda,nvtx for less.
    Several windows: --nsys-args=--capture-range-end=repeat:2.
    """
    from commopt_diagnose import nsys as nsight

    with errors_in_a_line():
        ranks = nsight.nsys_command(command, nproc_per_node=nproc_per_node, output_dir=output_dir, nsys_args=nsys_args)
        if print_only:
            typer.echo(shlex.join(ranks))
            return
        nsight.make_ready(output_dir, nsys_args)
        status = nsight.run(ranks)
    reports, raw = (
        ", ".join(map(str, paths)) for paths in (nsight.reports(output_dir), nsight.raw_reports(output_dir))
    )
    if reports:
        echo(f"commopt: reports: {reports}", err=True)
    if raw:
        echo(f"commopt: {raw}: {nsight.NO_IMPORT}", err=True)
    if not reports and not raw:
        failed = f"there are no reports: the command failed with status {status}, for which its output has the reason"
        echo(f"commopt: {failed if status else nsight.NO_REPORTS}", err=True)
    raise typer.Exit(status)
