"""What `commopt info` collects, on a terminal."""

from __future__ import annotations

from rich.console import Console

from lightning_commopt.commands.info.info import Info
from lightning_commopt.text.terminal import TextTable

_KERNELS = {"c": "C", "triton": "Triton", "torch": "plain torch"}


def print_info(found: Info, console: Console) -> None:
    """Prints tables of versions, devices, backends and DDP options, comm hooks and kernels."""
    for table in (_versions_table(found), _devices_table(found), _backends_table(found), _options_table(found)):
        console.print(table)
    console.print(f"comm_hook: {', '.join(found.comm_hooks)}", highlight=False)
    shown = ", ".join(f"{_KERNELS[name]} on {kind.upper()}" for kind, name in found.kernels.items())
    console.print(f"kernels of compressors: {shown}", highlight=False)


def _versions_table(found: Info) -> TextTable:
    table = TextTable("versions", "")
    for name, version in found.versions.items():
        table.add_row(name, version)
    table.add_row("platform", found.platform)
    return table


def _devices_table(found: Info) -> TextTable:
    table = TextTable("devices", "name", "memory", "cores")
    for device in found.devices:
        table.add_row(device.kind, device.name, f"{device.memory_bytes / 2**30:.1f} GiB", str(device.num_cores))
    return table


def _backends_table(found: Info) -> TextTable:
    table = TextTable("backends", "in this torch")
    for name, available in found.backends.items():
        shown = f"yes, {found.nccl_version}" if name == "nccl" and available else _yes_or_no(available)
        table.add_row(name, shown)
    return table


def _options_table(found: Info) -> TextTable:
    table = TextTable("DDP options", "in this torch", "since torch")
    for option in found.ddp_options:
        table.add_row(option.name, _yes_or_no(option.available), option.since)
    return table


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
