"""What this machine and this installation have: versions, devices, backends, DDP options, comm hooks."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console

from lightning_commopt.compressors import compressor_names
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.compressors.kernels.dispatch import has_triton
from lightning_commopt.measure.runs.machine import Device, devices, nccl_version, versions
from lightning_commopt.plan import DDP_OPTION_SINCE, ddp_options
from lightning_commopt.text.terminal import TextTable


@dataclass(frozen=True, kw_only=True)
class DDPOption:
    """A newer option of ``DistributedDataParallel``."""

    name: str  # the keyword
    since: str  # the first torch release that has it
    available: bool  # whether the installed torch has it


@dataclass(frozen=True, kw_only=True)
class Info:
    """What this machine and this installation have."""

    versions: dict[str, str]  # of Python, of this package and of those that it stands on
    platform: str  # operating system and architecture
    devices: list[Device]  # the CPU first, then the GPUs in the order of their indices
    backends: dict[str, bool]  # torch's communication backends, and whether this torch was built with each
    nccl_version: str | None  # of the NCCL in this torch; None where there is none
    ddp_options: list[DDPOption]  # the newer options, oldest first
    comm_hooks: list[str]  # the names that ``comm_hook`` takes
    # By kind of device, what the arithmetic of compressors is in: "c" on CPU, where there is a compiler, "triton" on
    # CUDA, where that is installed, else "torch"
    kernels: dict[str, str]


def collect() -> Info:
    """Looks at the machine and the installation; starts no process group and allocates nothing on a GPU."""
    return Info(
        versions=versions(),
        platform=platform.platform(),
        devices=devices(),
        backends={
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        },
        nccl_version=nccl_version(),
        ddp_options=[
            DDPOption(name=name, since=since, available=name in ddp_options())
            for name, since in DDP_OPTION_SINCE.items()
        ],
        comm_hooks=compressor_names(),
        kernels=kernels(),
    )


def kernels() -> dict[str, str]:
    """Returns what the arithmetic of compressors is in; makes the kernels in C, if they are not made yet."""
    return {
        "cpu": "torch" if c_library.load() is None else "c",
        "cuda": "triton" if has_triton() else "torch",
    }


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
