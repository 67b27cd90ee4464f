"""The console command ``commopt``: each tool is one command here, which parses, calls and prints."""

import json as json_text
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_commopt import info as _info

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
    """Prints versions, devices, backends, comm hooks, and which DDP options this torch has."""
    found = _info.collect()
    if json:
        typer.echo(json_text.dumps(found.to_dict(), indent=2))
        return
    console = Console()
    for table in (_versions_table(found), _devices_table(found), _backends_table(found), _options_table(found)):
        console.print(table)
    console.print(f"comm_hook: {', '.join(found.comm_hooks)}", highlight=False)


def _versions_table(found: _info.Info) -> Table:
    table = _table("versions", "")
    for name, version in found.versions.items():
        table.add_row(name, version)
    table.add_row("platform", found.platform)
    return table


def _devices_table(found: _info.Info) -> Table:
    table = _table("devices", "name", "memory", "cores")
    for device in found.devices:
        table.add_row(device.kind, device.name, f"{device.memory_bytes / 2**30:.1f} GiB", str(device.num_cores))
    return table


def _backends_table(found: _info.Info) -> Table:
    table = _table("backends", "in this torch")
    for name, available in found.backends.items():
        shown = f"yes, {found.nccl_version}" if name == "nccl" and available else _yes_or_no(available)
        table.add_row(name, shown)
    return table


def _options_table(found: _info.Info) -> Table:
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
