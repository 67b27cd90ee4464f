"""Findings about the hosts of a run, the worst first."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_commopt.commands.doctor.facts import Facts
from lightning_commopt.commands.doctor.ports import UnreachablePort
from lightning_commopt.launch.nccl_environment import find_mistakes
from lightning_commopt.launch.nccl_variables import parse_version
from lightning_commopt.text.findings import Finding, Severity, worst_first
from lightning_commopt.text.formatting import ranks_text

_SMALL_SHARED_MEMORY_BYTES = 2**30
_OF_ONE_HOST = ("docker", "lo", "virbr")
_SHARED_INTERFACE = (
    "set GLOO_SOCKET_IFNAME to the interface between the hosts; TORCH_DISTRIBUTED_DEBUG=DETAIL prints more"
)
_OPEN_PORTS = (
    "open all TCP ports between the hosts (firewall, security group): gloo and NCCL use any; or set GLOO_SOCKET_IFNAME"
    " and NCCL_SOCKET_IFNAME to an interface that both reach"
)


def find(
    everybody: Sequence[Facts], unreachable: Sequence[UnreachablePort] = (), gloo_error: str | None = None
) -> list[Finding]:
    """Returns findings, errors first; the arguments are the fields of a `Meeting`."""
    found: list[Finding] = list(_unreachable_ports(unreachable))
    if gloo_error is not None:
        what = f"an all-reduce over gloo fails: {gloo_error}"
        found.append(Finding(severity="error", where="all hosts", what=what, advice=_SHARED_INTERFACE))
    hosts = list({facts.host: facts for facts in reversed(everybody)}.values())[::-1]
    for facts in hosts:
        of_host = [*_of_host(facts), *(find_wrong_interfaces(facts) if len(hosts) > 1 else ())]
        of_host += find_in_adapters(facts)
        shown = [finding for finding in facts.topology if finding.severity != "note"]
        of_host += [replace(finding, advice=f"{finding.advice}; commopt topo shows all") for finding in shown]
        found += [replace(finding, where=facts.host) for finding in of_host]
    found += _differences(everybody)
    return worst_first(found)


def error(what: str, advice: str) -> Finding:
    """Returns a finding that prevents training."""
    return Finding(severity="error", what=what, advice=advice)


def warning(what: str, advice: str) -> Finding:
    """Returns a finding that may prevent training, or costs time."""
    return Finding(severity="warning", what=what, advice=advice)


def _unreachable_ports(unreachable: Sequence[UnreachablePort]) -> Iterator[Finding]:
    by_hosts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for from_host, to_host, port, reason in unreachable:
        where = f"port {port.port} of {port.address} ({port.interface}, which {port.users} would use)"
        by_hosts[from_host, to_host].append(f"{where}: {reason}")
    for (from_host, to_host), texts in by_hosts.items():
        what = f"cannot reach {to_host} at {'; '.join(texts)}"
        yield Finding(severity="error", where=from_host, what=what, advice=_OPEN_PORTS)


def _of_host(facts: Facts) -> Iterator[Finding]:
    yield from _packages_and_variables(facts)
    if facts.has_gpu_driver and not facts.gpus:
        yield error(
            f"NVIDIA's driver is loaded, but torch {facts.versions.get('torch')} finds no CUDA device",
            "install a torch that is built for CUDA and for this driver; check CUDA_VISIBLE_DEVICES",
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < _SMALL_SHARED_MEMORY_BYTES:
        yield warning(
            f"/dev/shm has {facts.shared_memory_bytes / 2**20:.0f} MiB: NCCL and the workers of dataloaders need more",
            "docker run --ipc=host, or --shm-size=8g; in Kubernetes a memory volume at /dev/shm",
        )
    num_threads = facts.num_threads * facts.ranks_per_node
    if facts.ranks_per_node > 1 and num_threads > facts.num_cores:
        yield warning(
            f"{facts.ranks_per_node} ranks with {facts.num_threads} threads each share {facts.num_cores} cores",
            f"OMP_NUM_THREADS={max(1, facts.num_cores // facts.ranks_per_node)}",
        )


def _packages_and_variables(facts: Facts) -> Iterator[Finding]:
    version = parse_version(facts.versions["nccl"]) if "nccl" in facts.versions else None
    yield from find_mistakes(facts.environment, version=version)


def find_wrong_interfaces(facts: Facts) -> Iterator[Finding]:
    """Finds interfaces that other hosts cannot reach, or that do not exist."""
    there = ", ".join(f"{interface.name} {interface.address}" for interface in facts.interfaces) or "none"
    named = facts.environment.get("GLOO_SOCKET_IFNAME")
    if named and facts.gloo_interface is None:
        yield error(
            f"GLOO_SOCKET_IFNAME={named}, and there is no such interface with an address; there are: {there}",
            "set it to the interface between the hosts",
        )
    elif not named and (facts.address is None or ipaddress.ip_address(facts.address).is_loopback):
        yield error(
            f"the host's name resolves to {facts.address or 'nothing'}, which other hosts cannot reach",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts, or correct /etc/hosts",
        )
    named = facts.environment.get("NCCL_SOCKET_IFNAME")
    if named and facts.nccl_interface is None:
        yield error(
            f"NCCL_SOCKET_IFNAME={named} leaves no interface; there are: {there}",
            "set it to the interface between the hosts, or exclude others, as in ^docker,lo",
        )
    elif facts.gpus and facts.nccl_interface is not None and facts.nccl_interface.name.startswith(_OF_ONE_HOST):
        yield error(
            f"NCCL would use {facts.nccl_interface.name}, which other hosts cannot reach; there are: {there}",
            "set NCCL_SOCKET_IFNAME to the interface between the hosts",
        )


def find_in_adapters(facts: Facts) -> Iterator[Finding]:
    """Finds what prevents the use of adapters, or slows them down."""
    for port in facts.ports:
        if port.state != "ACTIVE":
            yield warning(
                f"port {port.name} is {port.state}",
                "check the cable and the subnet manager, or exclude the port with NCCL_IB_HCA",
            )
        if port.errors:
            counts = ", ".join(f"{name} {count}" for name, count in port.errors.items())
            yield warning(
                f"port {port.name} has counted errors since it was reset: {counts}",
                "check whether they grow while you train; if so, replace the cable or the transceiver",
            )
    yield from _unequal_rates(facts)
    if facts.ports and facts.max_locked_bytes is not None:
        yield error(
            f"a process may lock {facts.max_locked_bytes / 2**20:.0f} MiB of memory: InfiniBand needs more",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    if facts.ports and facts.gpus and not facts.has_peer_memory and not facts.can_dma_buf:
        yield warning(
            "no GPUDirect RDMA: nvidia_peermem is not loaded, and DMA-BUF needs Linux 5.12 and NVIDIA's open modules",
            "modprobe nvidia_peermem; commopt nccl-log shows whether NCCL uses GDRDMA",
        )
    if facts.environment.get("NCCL_COLLNET_ENABLE") == "1" and not facts.has_sharp_plugin:
        yield warning(
            "NCCL_COLLNET_ENABLE=1, and no libnccl-net.so, without which NCCL has no SHARP",
            "put nccl-rdma-sharp-plugins (HPC-X) on LD_LIBRARY_PATH; 'CollNet' in NCCL's log shows that it is used",
        )


def _unequal_rates(facts: Facts) -> Iterator[Finding]:
    rates = {port.name: port.rate for port in facts.ports if port.state == "ACTIVE" and port.rate}
    if len(set(rates.values())) > 1:
        yield warning(
            f"ports run at different rates: {', '.join(f'{name} {rate}' for name, rate in rates.items())}",
            "check cables and switch ports; if the slow ones are for storage, exclude them with NCCL_IB_HCA",
        )


def _differences(everybody: Sequence[Facts]) -> Iterator[Finding]:
    """Compares what should be equal on all ranks."""
    for name in _names(facts.versions for facts in everybody):
        yield from _different(everybody, f"the version of {name}", [facts.versions.get(name) for facts in everybody])
    yield from _different(everybody, "--hosts", [",".join(facts.hosts) for facts in everybody])
    yield from _different(everybody, "the number of ranks", [facts.world_size for facts in everybody])
    yield from _different(everybody, "ranks on a host", [facts.ranks_per_node for facts in everybody], "warning")
    rates = [", ".join(sorted({port.rate for port in facts.ports})) or "none" for facts in everybody]
    yield from _different(everybody, "the rate of InfiniBand or RoCE ports", rates, "warning")
    yield from _different(
        everybody, "the number of GPUs of a host", [len(facts.gpus) for facts in everybody], "warning"
    )
    kinds = [", ".join(sorted(set(facts.gpus))) for facts in everybody]
    yield from _different(everybody, "the kind of GPU", kinds, "warning")
    for name in _names(facts.environment for facts in everybody):
        if name.startswith("NCCL_"):
            yield from _different(everybody, name, [facts.environment.get(name, "unset") for facts in everybody])


def _names(mappings: Iterable[Mapping[str, str]]) -> list[str]:
    return sorted({name for mapping in mappings for name in mapping})


def _different(
    everybody: Sequence[Facts], what: str, values: Sequence[Any], severity: Severity = "error"
) -> Iterator[Finding]:
    ranks: dict[Any, list[int]] = defaultdict(list)
    for facts, value in zip(everybody, values, strict=True):
        ranks[value].append(facts.rank)
    if len(ranks) > 1:
        shown = [f"{'none' if value in (None, '') else value} on {ranks_text(those)}" for value, those in ranks.items()]
        message = f"{what} differs: {', '.join(shown)}"
        yield Finding(severity=severity, where="all hosts", what=message, advice="make it the same everywhere")
