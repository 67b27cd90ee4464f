"""What this machine and this installation have: versions, devices, backends, DDP options, comm hooks."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_commopt.compressors import compressor_names
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.compressors.kernels.dispatch import has_triton
from lightning_commopt.measure.runs.machine import Device, devices, nccl_version, versions
from lightning_commopt.plan import DDP_OPTION_SINCE, ddp_options


@dataclass(frozen=True, kw_only=True)
class DDPOption:
    """A newer option of ``DistributedDataParallel``.

    Attributes:
        name: the keyword.
        since: the first torch release that has it.
        available: whether the installed torch has it.
    """

    name: str
    since: str
    available: bool


@dataclass(frozen=True, kw_only=True)
class Info:
    """What this machine and this installation have.

    Attributes:
        versions: of Python, of this package and of those that it stands on.
        platform: operating system and architecture.
        devices: the CPU first, then the GPUs in the order of their indices.
        backends: torch's communication backends, and whether this torch was built with each.
        nccl_version: of the NCCL in this torch; None where there is none.
        ddp_options: the newer options, oldest first.
        comm_hooks: the names that ``comm_hook`` takes.
        kernels: by kind of device, what the arithmetic of compressors is in: "c" on CPU, where there is a compiler,
            "triton" on CUDA, where that is installed, else "torch".
    """

    versions: dict[str, str]
    platform: str
    devices: list[Device]
    backends: dict[str, bool]
    nccl_version: str | None
    ddp_options: list[DDPOption]
    comm_hooks: list[str]
    kernels: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
