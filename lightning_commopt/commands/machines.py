"""Commands about a machine or a job: selftest, doctor, nccl-log, topo; and commands that run a job: nsys, tune."""

import shlex
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lightning_commopt.commands.errors import Json, check_outputs, echo, echo_notices, errors_in_a_line, print_json
from lightning_commopt.text.terminal import TextConsole

Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="Command of one rank, such as python train.py; or torchrun ...")
]


def selftest(
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is a device.")] = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Also several buckets, streams, speed, hangs: up to five minutes.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
) -> None:
    """Checks gradient sync on this machine's devices: exactness, equal ranks, resume, memory, measured times.

    Each outcome is printed, and written to --output, as soon as it is known. Exit status 1 if a check fails, 2 if it
    cannot run, or was interrupted before its end.
    """
    from lightning_commopt.commands.selftest import run
    from lightning_commopt.launch.process import InterruptedRun, raise_signals
    from lightning_commopt.measure.plain import write_json
    from lightning_commopt.testing.ranks import RankError

    console, latest = TextConsole(), None

    def keep(news: run.SelfTest) -> None:
        nonlocal latest
        latest = news
        # The outcome is written before it is printed, as printing may fail.
        if output is not None:
            write_json(output, asdict(news))
        if news.outcomes:
            run.print_outcome(news.outcomes[-1], console)
        else:
            run.print_place(news, console)

    with errors_in_a_line(RankError), run.progress_lines(console) as on_start, raise_signals():
        check_outputs(output)
        on_start("starting two ranks")
        with suppress(InterruptedRun):
            run.run_selftest(device, on_start, keep, is_full=full)
    if latest is None:
        raise typer.Exit(2)
    run.print_sum(latest, console)
    if output is not None:
        console.print(f"written to {output}")
    has_failed = any(outcome.status == "failed" for outcome in latest.outcomes)
    raise typer.Exit(1 if has_failed else 0 if latest.is_whole else 2)


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
    from lightning_commopt.commands.doctor.facts import collect_facts
    from lightning_commopt.commands.doctor.findings import find
    from lightning_commopt.commands.doctor.meeting import Meeting, MeetingError, meet
    from lightning_commopt.commands.doctor.terminal import print_findings
    from lightning_commopt.launch.environment import find_rank_identity

    with errors_in_a_line():
        identity = find_rank_identity(hosts, port)
        if identity is None and port is not None:
            raise ValueError("--port is where several hosts meet: give --hosts as well, or use torchrun or srun")
    facts = collect_facts(identity=identity)
    with errors_in_a_line(MeetingError):
        met = Meeting([facts], []) if identity is None else meet(facts, identity, limit_s=limit_s)
    findings = find(*met)
    if facts.rank == 0 and json:
        ranks = [asdict(rank_facts) for rank_facts in met.everybody]
        plain = {"ranks": ranks, "findings": [finding.to_plain() for finding in findings]}
        print_json(plain)
    elif facts.rank == 0:
        print_findings(findings, met.everybody, TextConsole())
    raise typer.Exit(any(finding.severity == "error" for finding in findings))


def _explain_hang(run_dir: Path, *, json: bool) -> None:
    from lightning_commopt.commands.doctor.terminal import print_hang_report
    from lightning_commopt.watch.hangs.records import read_hang_report

    with errors_in_a_line():
        report = read_hang_report(run_dir)
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
    from lightning_commopt.commands.nccl_log.findings import find_all
    from lightning_commopt.commands.nccl_log.reader import read_log
    from lightning_commopt.commands.nccl_log.terminal import print_log, to_plain

    with errors_in_a_line():
        log = read_log(files, keeps_order=run is not None)
        if run is not None:
            from lightning_commopt.commands.nccl_log.inspector import match_run
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


def topo(
    file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Text of nvidia-smi topo -m, or XML of NCCL; - is the input."),
    ] = None,
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
    from lightning_commopt.commands.topology.findings import find_all
    from lightning_commopt.commands.topology.sources import local_rank, read_file, read_machine
    from lightning_commopt.commands.topology.terminal import print_topology, to_plain, write_page
    from lightning_commopt.text.findings import print_findings

    with errors_in_a_line():
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


def nsys(
    command: Command,
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
    from lightning_commopt.commands.nsys import nsys as nsight

    with errors_in_a_line():
        ranks = nsight.nsys_command(command, nproc_per_node=nproc_per_node, output_dir=output_dir, nsys_args=nsys_args)
        if print_only:
            typer.echo(shlex.join(ranks))
            return
        nsight.make_ready(output_dir, nsys_args)
        status = nsight.run(ranks)
    reports = ", ".join(map(str, nsight.reports(output_dir)))
    echo(f"commopt: reports: {reports}" if reports else f"commopt: {nsight.NO_REPORTS}", err=True)
    raise typer.Exit(status)


def tune(
    command: Command,
    lossy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A compressor that may be chosen, such as int8; may be given several times."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file for the plan, for CommOptDDP(plan=FILE).")] = Path("plan.json"),
    whole_fit: Annotated[
        bool, typer.Option("--whole-fit", help="Train on when the plan is found; else the first fit ends then.")
    ] = False,
) -> None:
    """Runs COMMAND with plan="auto" in place of DDP, prints the plan that it finds, and writes it to a file.

    The script stays as it is: a Trainer of it that would use DDP, or CommOptDDP, gets CommOptDDP(plan="auto"). Exit
    status 1 if no fit has looked for a plan; the status of COMMAND if it fails.
    """
    from lightning_commopt.commands.tune.inject import run_tuned

    with errors_in_a_line():
        status, verdict = run_tuned(command, lossy=lossy or (), output=output, ends_fit=not whole_fit)
    if status:
        raise typer.Exit(status)
    if verdict is None:
        echo("commopt: no fit of COMMAND has looked for a plan: it needs a Trainer with DDP on several ranks", err=True)
        raise typer.Exit(1)
    echo(f"{verdict}\n{output}: CommOptDDP(plan={str(output)!r}) trains with this plan.")
