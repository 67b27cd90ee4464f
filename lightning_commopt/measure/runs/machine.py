"""What a run runs on: versions of packages, and devices."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

_DISTRIBUTIONS = {
    "lightning_commopt": "lightning-commopt",
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "hydra": "hydra-core",
}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that a rank can run on.

    Attributes:
        kind: "cpu" or "cuda".
        name: the maker's name of it.
        memory_bytes: its own memory; of a CPU the machine's.
        num_cores: cores that this process may use, or streaming multiprocessors.
    """

    kind: str
    name: str
    memory_bytes: int
    num_cores: int


def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of those that it stands on, as far as they are installed.

    >>> list(versions())
    ['python', 'lightning_commopt', 'torch', 'lightning', 'pytorch_lightning', 'hydra']
    """
    installed = {}
    for name, distribution in _DISTRIBUTIONS.items():
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(distribution)
    # torch's own string has the build in it, as in 2.6.0+cpu; the metadata of some builds lacks that.
    return {"python": platform.python_version(), **installed, "torch": str(torch.__version__)}


def devices() -> list[Device]:
    """Returns the CPU and every CUDA device that this process sees."""
    cpu = Device(kind="cpu", name=_cpu_name(), memory_bytes=_memory_bytes(), num_cores=_num_cpu_cores())
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [
        Device(kind="cuda", name=gpu.name, memory_bytes=gpu.total_memory, num_cores=gpu.multi_processor_count)
        for gpu in properties
    ]
    return [cpu, *gpus]


def nccl_version() -> str | None:
    """Returns the version of the NCCL that this torch was built with, such as "2.21.5"; None without NCCL."""
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _num_cpu_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux only; knows of taskset and of a scheduler's limits
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
