"""Facts about one rank's host and environment that training on several ranks depends on.

InfiniBand and RoCE, GPUDirect RDMA and SHARP are as files show them; ``ibstat`` and ``perfquery`` read the same.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from commopt_diagnose.control_groups import control_groups
from commopt_diagnose.rank_identity import RankIdentity, is_own_address
from commopt_diagnose.topology.findings import find_all
from commopt_diagnose.topology.machine import TopologyError, cpus_text
from commopt_diagnose.topology.nvml import read_text
from commopt_diagnose.topology.sources import read_machine
from lightning_commopt.launch.interfaces import (
    Interface,
    choose_for_gloo,
    choose_for_nccl,
    list_interfaces,
    own_address,
)
from lightning_commopt.measure.runs.machine import nccl_version, versions
from lightning_commopt.text.findings import Finding

_ERROR_COUNTERS = (
    *("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "excessive_buffer_overrun_errors"),
    *("link_error_recovery", "link_downed"),
)
_SHARP_FOLDERS = (
    *("opt/mellanox/sharp/lib", "opt/hpcx/nccl_rdma_sharp_plugin/lib", "usr/lib", "usr/lib/x86_64-linux-gnu"),
)
_DMA_BUF_KERNEL = (5, 12)  # the first Linux in which GPUDirect RDMA can use DMA-BUF
_IPC_LOCK = 14  # the number of CAP_IPC_LOCK, with which the kernel lets a process lock any memory for an adapter
_VARIABLES = re.compile(r"(NCCL|TORCH_NCCL|GLOO|OMP|MKL)_")


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    name: str  # adapter and port, such as "mlx5_0:1"
    state: str  # such as "ACTIVE"
    rate: str  # such as "200 Gb/sec (4X HDR)"
    errors: dict[str, int]  # error counters that are above 0


def read_ports(folder: Path) -> list[Port]:
    """Returns the ports of all adapters below ``/sys/class/infiniband``."""
    ports = []
    for path in sorted(folder.glob("*/ports/*")):
        name, state = f"{path.parents[1].name}:{path.name}", read_text(path / "state").rpartition(": ")[2]
        counts = {name: read_text(path / "counters" / name) for name in _ERROR_COUNTERS}
        errors = {name: int(text) for name, text in counts.items() if text.isdecimal() and int(text) > 0}
        ports.append(Port(name=name, state=state, rate=read_text(path / "rate"), errors=errors))
    return ports


def has_peer_memory(root: Path) -> bool:
    """Returns whether a kernel module for GPUDirect RDMA is loaded; AWS's driver of EFA can do without one."""
    names = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
    is_loaded = any(line.split(" ", 1)[0] in names for line in read_text(root / "proc/modules").splitlines())
    of_efa = (read_text(path) for path in (root / "sys/class/infiniband").glob("*/device/p2p"))
    return is_loaded or any(provider.startswith("NVIDIA") for provider in of_efa)


def can_dma_buf(root: Path, kernel: str = platform.release()) -> bool:
    """Returns whether GPUDirect RDMA works without the module, as a new kernel and NVIDIA's open modules allow."""
    version = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    return version >= _DMA_BUF_KERNEL and "Open Kernel Module" in read_text(root / "proc/driver/nvidia/version")


def has_sharp_plugin(root: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether NCCL would find a network plugin, which SHARP needs."""
    folders = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [root / folder for folder in _SHARP_FOLDERS]
    return any(list(folder.glob("libnccl-net*.so*")) for folder in folders)


def max_locked_bytes(root: Path) -> int | None:
    """Returns how much memory this process may lock; None without a limit, as root has outside of most containers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text(root / "proc/self/status"), re.MULTILINE)
    # In a user namespace a capability means nothing for adapters.
    is_free = match is not None and int(match[1], 16) >> _IPC_LOCK & 1
    is_free = is_free and read_text(root / "proc/self/uid_map").split() == ["0", "0", str(2**32 - 1)]
    return None if is_free or limit == resource.RLIM_INFINITY else limit


def quota_cores(root: Path) -> float | None:
    """Returns the processor time that a container or session may use, in cores, as Kubernetes limits it; or None."""
    limits = []
    for folder in control_groups("cpu", root):
        of_v1 = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        words = read_text(folder / "cpu.max").split() or of_v1
        # Without a limit the first is "max", or -1.
        if all(map(str.isdecimal, words)):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank finds on its host."""

    rank: int = 0  # global rank
    host: str
    world_size: int = 1  # number of ranks that this rank expects
    hosts: Sequence[str] = ()  # value of ``--hosts``; empty under a launcher
    address: str | None  # what the host's name resolves to, which gloo listens on; None if it does not resolve
    is_own_address: bool = True  # whether this host has that address, without which gloo listens on the loopback device
    versions: dict[str, str]  # versions of Python, torch, NCCL and the packages
    gpus: Sequence[str] = ()  # names of the CUDA devices that torch finds
    has_gpu_driver: bool = False  # whether NVIDIA's driver is loaded
    has_gpu_files: bool = True  # whether there is a device file of a GPU, as in a container that was given one
    num_cores: int  # number of cores that this rank may use
    cores: str = ""  # these cores, such as "0-31,64"; empty if the system does not say
    quota_cores: float | None = None  # processor time that the ranks of a container may use together, in cores
    num_threads: int  # threads that torch would use
    ranks_per_node: int = 1  # ranks on this host
    shared_memory_bytes: int | None = None  # size of /dev/shm; None without one
    max_locked_bytes: int | None = None  # memory that a process may lock; None without a limit
    ports: Sequence[Port] = ()  # ports of InfiniBand and RoCE adapters
    has_verbs_files: bool = True  # whether there is a device file of an adapter, as in a container that was given one
    has_peer_memory: bool = False  # whether a kernel module for GPUDirect RDMA, or EFA's driver with it, is loaded
    can_dma_buf: bool = False  # whether GPUDirect RDMA works without this module
    has_sharp_plugin: bool = False  # whether NCCL would find a network plugin
    interfaces: Sequence[Interface] = ()  # network interfaces that are up
    gloo_interface: Interface | None = None  # the interface that gloo would use; None if there is none
    nccl_interface: Interface | None = None  # the interface that NCCL would use for bootstrap; None if there is none
    topology: Sequence[Finding] = ()  # findings of ``commopt topo``
    no_topology: str | None = None  # why the topology was not read; None if it was
    environment: dict[str, str] = field(default_factory=dict)  # environment variables of NCCL, gloo and OpenMP


def collect_facts(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), identity: RankIdentity | None = None
) -> Facts:
    """Reads the facts of this host below ``root`` without changing anything; a process alone has no ``identity``."""
    nccl, address, interfaces = nccl_version(), own_address(), list_interfaces()
    topology, no_topology = _topology(identity)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    of_rank: dict[str, Any] = {"host": socket.gethostname()}
    if identity is not None:
        of_rank = {name: getattr(identity, name) for name in ("rank", "host", "world_size", "ranks_per_node")}
        of_rank["hosts"] = [] if identity.is_of_launcher else list(identity.rank_hosts)
    return Facts(
        **of_rank,
        address=address,
        is_own_address=is_own_address(socket.gethostname()),
        versions=versions() | ({} if nccl is None else {"nccl": nccl}),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        has_gpu_driver=(root / "proc/driver/nvidia/version").exists(),
        has_gpu_files=any((root / "dev").glob("nvidia[0-9]*")),
        num_cores=len(cores) or os.cpu_count() or 1,
        cores=cpus_text(cores),
        quota_cores=quota_cores(root),
        num_threads=torch.get_num_threads(),
        shared_memory_bytes=_shared_memory_bytes(root / "dev/shm"),
        max_locked_bytes=max_locked_bytes(root),
        ports=read_ports(root / "sys/class/infiniband"),
        has_verbs_files=any((root / "dev/infiniband").glob("uverbs*")),
        has_peer_memory=has_peer_memory(root),
        can_dma_buf=can_dma_buf(root),
        has_sharp_plugin=has_sharp_plugin(root, environment),
        interfaces=interfaces,
        gloo_interface=choose_for_gloo(interfaces, environment, address),
        nccl_interface=choose_for_nccl(interfaces, environment),
        topology=topology,
        no_topology=no_topology,
        environment={name: value for name, value in environment.items() if _VARIABLES.match(name)},
    )


def first_of_hosts(all_facts: Sequence[Facts]) -> list[Facts]:
    """Returns the facts of the first rank of each host."""
    return list({facts.host: facts for facts in reversed(all_facts)}.values())[::-1]


def _topology(identity: RankIdentity | None) -> tuple[list[Finding], str | None]:
    if identity is not None and identity.local_rank != 0:
        return [], "only the first rank of a host reads it"
    try:
        return find_all(read_machine()), None
    except TopologyError as error:
        return [], str(error).partition(" (")[2].rpartition("); ")[0]


def _shared_memory_bytes(folder: Path) -> int | None:
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_blocks * size.f_frsize
