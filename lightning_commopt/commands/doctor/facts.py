"""Facts about one rank's host and environment that training on several ranks depends on."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lightning_commopt.commands.doctor import adapters
from lightning_commopt.commands.doctor.adapters import Port
from lightning_commopt.commands.topology.findings import find_all
from lightning_commopt.commands.topology.machine import TopologyError
from lightning_commopt.commands.topology.sources import read_machine
from lightning_commopt.launch.interfaces import (
    Interface,
    choose_for_gloo,
    choose_for_nccl,
    list_interfaces,
    own_address,
)
from lightning_commopt.launch.rank_identity import RankIdentity
from lightning_commopt.measure.runs.machine import nccl_version, versions
from lightning_commopt.text.findings import Finding

_VARIABLES = re.compile(r"(NCCL|TORCH_NCCL|GLOO|OMP|MKL)_")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank finds on its host.

    Attributes:
        rank: global rank.
        host: name of the host.
        world_size: number of ranks that this rank expects.
        hosts: value of ``--hosts``; empty under a launcher.
        address: that the host's name resolves to, which gloo listens on; None if it resolves to nothing.
        versions: of Python, torch, NCCL and the packages.
        gpus: names of the CUDA devices that torch finds.
        has_gpu_driver: NVIDIA's driver is loaded.
        num_cores: available to this rank.
        num_threads: that torch would use.
        ranks_per_node: ranks on this host.
        shared_memory_bytes: size of /dev/shm; None without one.
        max_locked_bytes: memory that a process may lock; None without a limit.
        ports: of InfiniBand and RoCE adapters.
        has_peer_memory: the kernel module for GPUDirect RDMA is loaded.
        can_dma_buf: GPUDirect RDMA works without it.
        has_sharp_plugin: NCCL would find a network plugin.
        interfaces: network interfaces that are up.
        gloo_interface: that gloo would use; None if there is none.
        nccl_interface: that NCCL would use for bootstrap; None if there is none.
        topology: findings of ``commopt topo``.
        no_topology: why there are none; None where it ran.
        environment: variables of NCCL, gloo and OpenMP.
    """

    rank: int = 0
    host: str
    world_size: int = 1
    hosts: list[str] = field(default_factory=list)
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
    can_dma_buf: bool = False
    has_sharp_plugin: bool = False
    interfaces: list[Interface] = field(default_factory=list)
    gloo_interface: Interface | None = None
    nccl_interface: Interface | None = None
    topology: list[Finding] = field(default_factory=list)
    no_topology: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def collect_facts(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), identity: RankIdentity | None = None
) -> Facts:
    """Reads the facts of this host below ``root`` without changing anything; a process alone has no ``identity``."""
    nccl = nccl_version()
    address = own_address()
    interfaces = list_interfaces()
    topology, no_topology = _topology(identity)
    return Facts(
        rank=0 if identity is None else identity.rank,
        host=socket.gethostname() if identity is None else identity.host,
        world_size=1 if identity is None else identity.world_size,
        hosts=[] if identity is None or identity.is_of_launcher else list(identity.rank_hosts),
        address=address,
        versions={**versions(), **({"nccl": nccl} if nccl is not None else {})},
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        has_gpu_driver=(root / "proc/driver/nvidia/version").exists(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        ranks_per_node=1 if identity is None else identity.ranks_per_node,
        shared_memory_bytes=_shared_memory_bytes(root / "dev/shm"),
        max_locked_bytes=_max_locked_bytes(),
        ports=adapters.read_ports(root / "sys/class/infiniband"),
        has_peer_memory=adapters.has_peer_memory(root),
        can_dma_buf=adapters.can_dma_buf(root),
        has_sharp_plugin=adapters.has_sharp_plugin(root, environment),
        interfaces=interfaces,
        gloo_interface=choose_for_gloo(interfaces, environment, address),
        nccl_interface=choose_for_nccl(interfaces, environment),
        topology=topology,
        no_topology=no_topology,
        environment={name: value for name, value in environment.items() if _VARIABLES.match(name)},
    )


def facts_from_plain(plain: Mapping[str, Any]) -> Facts:
    """Reverts ``asdict`` and JSON; entries that another version of this package has added are dropped."""
    known = {each.name: plain[each.name] for each in fields(Facts) if each.name in plain}
    known["ports"] = [Port(**port) for port in known.get("ports", [])]
    known["interfaces"] = [Interface(*each) for each in known.get("interfaces", [])]
    known["topology"] = [Finding.from_plain(each) for each in known.get("topology", [])]
    for name in ("gloo_interface", "nccl_interface"):
        known[name] = Interface(*known[name]) if known.get(name) else None
    return Facts(**known)


def _topology(identity: RankIdentity | None) -> tuple[list[Finding], str | None]:
    if identity is not None and identity.local_rank != 0:
        return [], "the host's first rank looks"
    try:
        return find_all(read_machine()), None
    except TopologyError as error:
        return [], str(error).partition(";")[0].partition(" (")[0]


def _shared_memory_bytes(folder: Path) -> int | None:
    try:
        size = os.statvfs(folder)
    except OSError:
        return None
    return size.f_blocks * size.f_frsize


def _max_locked_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit
