"""The machine of a run: versions of packages, devices, and the peak memory of a fit."""

import os
import platform
import re
import resource
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_KIBIBYTE = 1024  # the "kB" of proc(5), and the unit of getrusage(2) on Linux; macOS has bytes
_UNIT_OF_GETRUSAGE = 1 if sys.platform == "darwin" else _KIBIBYTE
_RESET_PEAK = "5"  # see proc(5), /proc/pid/clear_refs
_DISTRIBUTIONS = {
    "lightning_commopt": "lightning-commopt",
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "hydra": "hydra-core",
}


def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of its main dependencies, if installed.

    >>> list(versions())
    ['python', 'lightning_commopt', 'torch', 'lightning', 'pytorch_lightning', 'hydra']
    """
    installed = {}
    for name, distribution in _DISTRIBUTIONS.items():
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(distribution)
    # torch's own string includes the build, as in 2.6.0+cpu; the metadata of some builds lacks it.
    return {"python": platform.python_version(), **installed, "torch": str(torch.__version__)}


def devices() -> list[dict[str, Any]]:
    """Returns the CPU and every CUDA device that this process sees, with the vendor's name.

    For the CPU, the memory is the machine's and the cores are those that this process may use. For a GPU, they are its
    own memory and its multiprocessors.
    """
    # Linux counts the cores that taskset or a job scheduler allow; elsewhere the function does not exist.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = {"kind": "cpu", "name": _cpu_name(), "memory_bytes": memory_bytes, "num_cores": num_cores}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [
        {"kind": "cuda", "name": gpu.name, "memory_bytes": gpu.total_memory, "num_cores": gpu.multi_processor_count}
        for gpu in properties
    ]
    return [cpu, *gpus]


def nccl_version() -> str | None:
    """Returns the version of torch's NCCL, such as "2.21.5"; None without NCCL."""
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8") if listing.is_file() else ""
    match = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


class PeakMemory:
    """The peak memory of a rank's device from now on.

    On CUDA it is the memory that torch allocated, and ``torch.cuda``'s own peak is reset. On CPU it is the resident
    memory of the process; unless the system can reset this peak, as Linux can, it is the peak since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_reset = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
            self._is_reset = True

    @property
    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._is_reset:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            if match := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE):
                return int(match[1]) * _KIBIBYTE
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_OF_GETRUSAGE
