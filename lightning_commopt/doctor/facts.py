"""What one rank's host and environment are like, as far as training on several ranks depends on it."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_commopt.runs.advisories import warnings as advisories
from lightning_commopt.runs.info import nccl_version, versions

_ERROR_COUNTERS = (
    *("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "excessive_buffer_overrun_errors"),
    *("link_error_recovery", "link_downed"),
)
_VARIABLES = re.compile(r"(NCCL|TORCH_NCCL|GLOO|OMP|MKL)_")


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE adapter.

    Attributes:
        name: adapter and port, such as "mlx5_0:1".
        state: such as "ACTIVE".
        rate: such as "200 Gb/sec (4X HDR)".
        errors: error counters that are above 0.
    """

    name: str
    state: str
    rate: str
    errors: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank finds.

    Attributes:
        rank: its number.
        host: the name of its host.
        address: what that name resolves to, which gloo listens on; None if to nothing.
        versions: of Python, torch, NCCL and the packages.
        gpus: names of the CUDA devices that torch finds.
        has_gpu_driver: a driver of NVIDIA's is loaded.
        num_cores: that this rank may use.
        num_threads: that torch would use.
        ranks_per_node: ranks on this host.
        shared_memory_bytes: of /dev/shm; None where there is none.
        max_locked_bytes: memory that a process may lock; None for any.
        ports: of InfiniBand and RoCE adapters.
        has_peer_memory: the kernel module for GPUDirect RDMA is loaded.
        environment: variables of NCCL, gloo and OpenMP.
        advisories: published faults of installed packages.
    """

    rank: int = 0
    host: str
    address: str | None
    versions: dict[str, str]
    gpus: list[str] = field(default_factory=list)
    has_gpu_driver: bool = False
    num_cores: int
    num_threads: int
    ranks_per_node: int = 1
    shared_memory_bytes: int | None = None
    max_locked_bytes: int | None = None
    ports: list[Port] = field(default_factory=list)
    has_peer_memory: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    advisories: list[str] = field(default_factory=list)


def collect_facts(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Facts:
    """Looks at this host; starts nothing and changes nothing.

    Args:
        environment: variables of this process.
        root: of the file system, whose ``sys`` and ``proc`` are read.
    """
    nccl = nccl_version()
    return Facts(
        rank=_number(environment, "RANK", 0),
        host=socket.gethostname(),
        address=_own_address(),
        versions={**versions(), **({"nccl": nccl} if nccl is not None else {})},
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        has_gpu_driver=(root / "proc/driver/nvidia/version").exists(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        ranks_per_node=_number(environment, "LOCAL_WORLD_SIZE", 1),
        shared_memory_bytes=_shared_memory_bytes(root / "dev/shm"),
        max_locked_bytes=_max_locked_bytes(),
        ports=read_ports(root / "sys/class/infiniband"),
        has_peer_memory=_has_module(root / "proc/modules", ("nvidia_peermem", "nv_peer_mem")),
        environment={name: value for name, value in environment.items() if _VARIABLES.match(name)},
        advisories=advisories(),
    )


def read_ports(folder: Path) -> list[Port]:
    """Returns the ports of all adapters below ``/sys/class/infiniband``."""
    ports = []
    for path in sorted(folder.glob("*/ports/*")):
        counts = {name: _count(path / "counters" / name) for name in _ERROR_COUNTERS}
        ports.append(
            Port(
                name=f"{path.parents[1].name}:{path.name}",
                state=_text(path / "state").rpartition(": ")[2],
                rate=_text(path / "rate"),
                errors={name: count for name, count in counts.items() if count > 0},
            )
        )
    return ports


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _shared_memory_bytes(folder: Path) -> int | None:
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_blocks * size.f_frsize


def _max_locked_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _has_module(modules: Path, names: tuple[str, ...]) -> bool:
    return any(line.split(" ", 1)[0] in names for line in _text(modules).splitlines())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _count(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else default
