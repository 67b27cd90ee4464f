"""The console command ``commopt``: one function for each command, which parses, calls and prints.

A command imports what it needs when it runs: importing torch takes seconds, and most commands do not need it.
"""

import typer

from lightning_commopt.commands import runs
from lightning_commopt.commands.bench.command import bench
from lightning_commopt.commands.doctor.command import doctor
from lightning_commopt.commands.errors import errors_in_a_line
from lightning_commopt.commands.info.command import info
from lightning_commopt.commands.nccl_log.command import nccl_log
from lightning_commopt.commands.nsys.command import nsys
from lightning_commopt.commands.predict.command import predict
from lightning_commopt.commands.selftest.command import selftest
from lightning_commopt.commands.topology.command import topo
from lightning_commopt.commands.tune.command import tune
from lightning_commopt.text.terminal import print_in_any_encoding

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Tools around lightning_commopt. Training is commopt-train.",
)


@app.callback()
def _main() -> None:
    print_in_any_encoding()


app.command()(info)
app.command()(selftest)
app.command()(doctor)
app.command()(nccl_log)
app.command()(topo)
app.command()(errors_in_a_line(status=2)(bench))
app.command()(runs.trace)
app.command()(runs.summary)
app.command()(runs.report)
app.command()(predict)
app.command(context_settings={"allow_interspersed_args": False})(nsys)
app.command(context_settings={"allow_interspersed_args": False})(tune)
