"""The console command ``commopt``: one function for each command, which parses, calls and prints.

A command imports what it needs when it runs: torch takes seconds to import, and most commands do without.
"""

import typer

from lightning_commopt.cli import links, machine, runs
from lightning_commopt.cli.bench import bench
from lightning_commopt.cli.errors import errors_in_a_line
from lightning_commopt.terminal import print_in_any_encoding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tools around lightning_commopt. Training is commopt-train.",
)


@app.callback()
def _main() -> None:
    print_in_any_encoding()


app.command()(machine.info)
app.command()(machine.selftest)
app.command()(machine.doctor)
app.command()(links.nccl_log)
app.command()(links.topo)
app.command()(errors_in_a_line(status=2)(bench))
app.command()(runs.trace)
app.command()(runs.summary)
app.command()(runs.report)
app.command(context_settings={"allow_interspersed_args": False})(runs.nsys)
