"""The console command ``commopt``: one function for each command, which parses, calls and prints.

A command imports what it needs when it runs: torch takes seconds to import, and only ``info`` and ``nsys`` need it.
"""

import json as json_text
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lightning_commopt.runs.info import Info

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tools around lightning_commopt. Training is commopt-train.",
)


_KERNELS = {"c": "C", "triton": "Triton", "torch": "plain torch"}


@app.callback()
def _main() -> None:
    # With a callback typer keeps the command's name even while there is one command only.
    pass


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    from lightning_commopt.runs.info import collect

    found = collect()
    if json:
        typer.echo(json_text.dumps(found.to_dict(), indent=2))
        return
    console = Console()
    for table in (_versions_table(found), _devices_table(found), _backends_table(found), _options_table(found)):
        console.print(table)
    console.print(f"comm_hook: {', '.join(found.comm_hooks)}", highlight=False)
    shown = ", ".join(f"{_KERNELS[name]} on {kind.upper()}" for kind, name in found.kernels.items())
    console.print(f"arithmetic of compressors: {shown}", highlight=False)


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
        f"{written.path}: steps {written.first_step} to {written.last_step} of {written.num_ranks} rank(s);"
        f" {written.num_steps_recorded} steps were saved. Open it in https://ui.perfetto.dev"
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

    An nsys older than 2026.1 may not know the trace nccl: --nsys-args=--trace=cuda,nvtx,osrt leaves it out.
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


@contextmanager
def _errors_in_a_line(status: int = 1) -> Iterator[None]:
    """Turns a user's mistake into one line and an exit status; other errors keep their traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"commopt: {error}", err=True)
        raise typer.Exit(status) from None


def _versions_table(found: "Info") -> Table:
    table = _table("versions", "")
    for name, version in found.versions.items():
        table.add_row(name, version)
    table.add_row("platform", found.platform)
    return table


def _devices_table(found: "Info") -> Table:
    table = _table("devices", "name", "memory", "cores")
    for device in found.devices:
        table.add_row(device.kind, device.name, f"{device.memory_bytes / 2**30:.1f} GiB", str(device.num_cores))
    return table


def _backends_table(found: "Info") -> Table:
    table = _table("backends", "in this torch")
    for name, available in found.backends.items():
        shown = f"yes, {found.nccl_version}" if name == "nccl" and available else _yes_or_no(available)
        table.add_row(name, shown)
    return table


def _options_table(found: "Info") -> Table:
    table = _table("DDP options", "in this torch", "since torch")
    for option in found.ddp_options:
        table.add_row(option.name, _yes_or_no(option.available), option.since)
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # where the output is narrow nothing is cut off
    table.columns[0].no_wrap = True
    return table


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
