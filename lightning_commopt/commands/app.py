"""The console command ``commopt``: one function for each command, here or in its module, which parses and prints.

A command imports what it needs when it runs: importing torch takes seconds, and most commands do not need it. Other
distributions add commands with an entry point of the group ``commopt.commands`` that names a `typer.Typer`.
"""

from importlib.metadata import entry_points, version
from inspect import getdoc
from typing import Annotated

import typer

from lightning_commopt.commands import runs
from lightning_commopt.commands.errors import AFTER, BEFORE, DURING, Json, echo, print_json
from lightning_commopt.commands.machines import run, selftest, tune
from lightning_commopt.text.terminal import TextConsole, print_in_any_encoding

GROUP = "commopt.commands"
"""The group of entry points."""


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Tools around lightning_commopt. Training is commopt-train.",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"lightning-commopt {version('lightning-commopt')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    print_in_any_encoding()


@app.command(rich_help_panel=BEFORE, epilog="Example: commopt info --json")
def info(json: Json = False) -> None:
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    from lightning_commopt.commands.info.info import collect, print_info

    facts = collect()
    if json:
        print_json(facts)
    else:
        print_info(facts, TextConsole())


app.command(rich_help_panel=BEFORE, epilog="Example: commopt selftest --device cpu")(selftest)
app.command(
    rich_help_panel=DURING,
    epilog="Example: commopt run -- python train.py",
    context_settings={"allow_interspersed_args": False},
)(run)
app.command(
    rich_help_panel=DURING,
    epilog="Example: commopt tune --lossy int8 -- torchrun --nproc-per-node 8 train.py",
    context_settings={"allow_interspersed_args": False},
)(tune)
app.command(rich_help_panel=AFTER, epilog="Example: commopt summary outputs")(runs.summary)
app.command(rich_help_panel=AFTER, epilog="Example: commopt trace outputs --num-steps 20")(runs.trace)
app.command(rich_help_panel=AFTER, epilog="Example: commopt predict outputs --ranks 64 --link 25gbit")(runs.predict)
app.command(rich_help_panel=AFTER, epilog="Example: commopt report multirun/2026-11-27/12-00-00")(runs.report)


def _add_missing(name: str) -> None:
    """Adds a command that names the distribution to install, whatever its arguments are."""
    pip = "pip install commopt-diagnose"
    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=pip, rich_help_panel="Not installed", add_help_option=False, context_settings=any_arguments)
    def missing(context: typer.Context) -> None:
        echo(f"commopt: {context.info_name} is in a distribution that is not installed: {pip}", err=True)
        raise typer.Exit(2)


def _add_others() -> None:
    """Adds the commands of other distributions; one that cannot be loaded keeps no other command from running."""
    is_diagnose_missing = True
    for entry_point in entry_points(group=GROUP):
        try:
            app.registered_commands += entry_point.load().registered_commands
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            echo(f"commopt: the commands of {entry_point.name} cannot be loaded ({reason})", err=True)
        else:
            is_diagnose_missing = is_diagnose_missing and entry_point.name != "diagnose"
    if is_diagnose_missing:
        for name in ("bench", "doctor", "nccl-log", "nsys", "topo"):
            _add_missing(name)


def _fill_paragraphs() -> None:
    """Leaves it to the terminal where the lines of a help end; typer breaks them where the docstring does."""
    for command in app.registered_commands:
        paragraphs = (command.help or getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


_add_others()
_fill_paragraphs()
