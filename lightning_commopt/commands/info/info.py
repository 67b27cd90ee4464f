"""Collects and prints what this machine and installation have: versions, devices, backends, options, comm hooks."""

from __future__ import annotations

import platform
from typing import Any

import torch.distributed as dist
from rich.console import Console

from lightning_commopt.compressors import compressor_names
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.compressors.kernels.dispatch import has_triton
from lightning_commopt.measure.runs.machine import devices, nccl_version, versions
from lightning_commopt.plan.ddp import DDP_OPTION_SINCE, ddp_options
from lightning_commopt.text.terminal import TextTable

_KERNELS = {"c": "C", "triton": "Triton", "torch": "plain torch"}
_YES_OR_NO = {True: "yes", False: "no"}


def collect() -> dict[str, Any]:
    """Returns what ``--json`` prints; starts no process group and allocates nothing on a GPU."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "devices": devices(),  # the CPU, then the GPUs by index
        # torch's communication backends, and whether this torch was built with each.
        "backends": {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi")},
        "nccl_version": nccl_version(),  # the version of this torch's NCCL; None without NCCL
        # The newer options of DistributedDataParallel, oldest first, with the first torch release that has each.
        "ddp_options": [
            {"name": name, "since": since, "available": name in ddp_options()}
            for name, since in DDP_OPTION_SINCE.items()
        ],
        "comm_hooks": compressor_names(),
        # What compressors calculate with on each kind of device: "c" on a CPU with a compiler, "triton" on CUDA if that
        # is installed, otherwise "torch". This compiles the C kernels if that has not been done yet.
        "kernels": {"cpu": "torch" if c_library.load() is None else "c", "cuda": "triton" if has_triton() else "torch"},
    }


def print_info(facts: dict[str, Any], console: Console) -> None:
    """Prints tables of versions, devices, backends and DDP options, comm hooks and kernels."""
    versions = TextTable("versions", "")
    for name, version in (facts["versions"] | {"platform": facts["platform"]}).items():
        versions.add_row(name, version)
    devices = TextTable("devices", "name", "memory", "cores")
    for device in facts["devices"]:
        memory = f"{device['memory_bytes'] / 2**30:.1f} GiB"
        devices.add_row(device["kind"], device["name"], memory, str(device["num_cores"]))
    backends = TextTable("backends", "in this torch")
    for name, available in facts["backends"].items():
        is_nccl = name == "nccl" and available
        backends.add_row(name, f"yes, {facts['nccl_version']}" if is_nccl else _YES_OR_NO[available])
    options = TextTable("DDP options", "in this torch", "since torch")
    for option in facts["ddp_options"]:
        options.add_row(option["name"], _YES_OR_NO[option["available"]], option["since"])
    for table in (versions, devices, backends, options):
        console.print(table)
    console.print(f"comm_hook: {', '.join(facts['comm_hooks'])}", highlight=False)
    shown = ", ".join(f"{_KERNELS[name]} on {kind.upper()}" for kind, name in facts["kernels"].items())
    console.print(f"kernels of compressors: {shown}", highlight=False)
