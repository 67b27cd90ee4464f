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

_KERNELS = {"c": "C", "triton": "Triton", "torch": "plain torch"}
_YES_OR_NO = {True: "yes", False: "no"}


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
        backends={name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi")},
        nccl_version=nccl_version(),
        ddp_options=[
            DDPOption(name=name, since=since, available=name in ddp_options())
            for name, since in DDP_OPTION_SINCE.items()
        ],
        comm_hooks=compressor_names(),
        # Compiles those in C, if that was not done yet
        kernels={"cpu": "torch" if c_library.load() is None else "c", "cuda": "triton" if has_triton() else "torch"},
    )


def print_info(found: Info, console: Console) -> None:
    """Prints tables of versions, devices, backends and DDP options, comm hooks and kernels."""
    versions = TextTable("versions", "")
    for name, version in (found.versions | {"platform": found.platform}).items():
        versions.add_row(name, version)
    devices = TextTable("devices", "name", "memory", "cores")
    for device in found.devices:
        devices.add_row(device.kind, device.name, f"{device.memory_bytes / 2**30:.1f} GiB", str(device.num_cores))
    backends = TextTable("backends", "in this torch")
    for name, available in found.backends.items():
        backends.add_row(name, f"yes, {found.nccl_version}" if name == "nccl" and available else _YES_OR_NO[available])
    options = TextTable("DDP options", "in this torch", "since torch")
    for option in found.ddp_options:
        options.add_row(option.name, _YES_OR_NO[option.available], option.since)
    for table in (versions, devices, backends, options):
        console.print(table)
    console.print(f"comm_hook: {', '.join(found.comm_hooks)}", highlight=False)
    shown = ", ".join(f"{_KERNELS[name]} on {kind.upper()}" for kind, name in found.kernels.items())
    console.print(f"kernels of compressors: {shown}", highlight=False)
