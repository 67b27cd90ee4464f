"""The console command ``commopt``: one function for each command, here or in its module, which parses and prints.

A command imports what it needs when it runs: importing torch takes seconds, and most commands do not need it.
"""

import typer

from lightning_commopt.commands import runs
from lightning_commopt.commands.bench.command import bench
from lightning_commopt.commands.errors import Json, errors_in_a_line, print_json
from lightning_commopt.commands.machines import doctor, nccl_log, nsys, selftest, topo, tune
from lightning_commopt.text.terminal import TextConsole, print_in_any_encoding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tools around lightning_commopt. Training is commopt-train.",
)


@app.callback()
def _main() -> None:
    print_in_any_encoding()


@app.command()
def info(json: Json = False) -> None:
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    from lightning_commopt.commands.info.info import collect, print_info

    facts = collect()
    if json:
        print_json(facts)
    else:
        print_info(facts, TextConsole())


app.command()(selftest)
app.command()(doctor)
app.command()(nccl_log)
app.command()(topo)
app.command()(errors_in_a_line()(bench))
app.command()(runs.trace)
app.command()(runs.summary)
app.command()(runs.report)
app.command()(runs.predict)
app.command(context_settings={"allow_interspersed_args": False})(nsys)
app.command(context_settings={"allow_interspersed_args": False})(tune)
