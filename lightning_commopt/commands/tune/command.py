"""The command ``commopt tune``: parses, calls and prints."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_commopt.commands.errors import errors_in_a_line


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
    from lightning_commopt.commands.tune.run import run_tuned

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
