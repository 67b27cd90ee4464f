"""Commands that run a training program: nsys, tune."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lightning_commopt.commands.errors import errors_in_a_line


def nsys(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="Command of one rank, such as python train.py; or torchrun and its words."
        ),
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
    from lightning_commopt.commands.nsys import nsys as nsight

    with errors_in_a_line():
        ranks = nsight.nsys_command(command, nproc_per_node=nproc_per_node, output_dir=output_dir, nsys_args=nsys_args)
        if print_only:
            typer.echo(shlex.join(ranks))
            return
        nsight.make_ready(output_dir, nsys_args)
        status = nsight.run(ranks)
    reports = ", ".join(map(str, nsight.reports(output_dir)))
    typer.echo(f"commopt: reports: {reports}" if reports else f"commopt: {nsight.NO_REPORTS}", err=True)
    raise typer.Exit(status)


def tune(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The training, such as python train.py, or torchrun and its words."),
    ],
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
    status 1 if no fit has looked for a plan; that of COMMAND if it fails.
    """
    from lightning_commopt.commands.tune.inject import run_tuned

    with errors_in_a_line(status=2):
        status, verdict = run_tuned(command, lossy=lossy or (), output=output, ends_fit=not whole_fit)
    if status:
        raise typer.Exit(status)
    if verdict is None:
        typer.echo(
            "commopt: no fit of COMMAND has looked for a plan: it needs a Trainer with DDP on several ranks", err=True
        )
        raise typer.Exit(1)
    typer.echo(f"{verdict}\n{output}: CommOptDDP(plan={str(output)!r}) trains with this plan.")
