"""Findings about the hosts of a run, the worst first."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commopt_diagnose.doctor.facts import Facts, Port, first_of_hosts
from commopt_diagnose.doctor.meeting import UnreachablePort
from commopt_diagnose.findings import FindingTexts, worst_first
from commopt_diagnose.nccl_settings import OF_ONE_RANK
from commopt_diagnose.topology.machine import parse_cpus
from lightning_commopt.launch.nccl_variables import find_mistakes, parse_version
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import count, grouped, ranks_text

_SMALL_SHARED_MEMORY_BYTES = 2**30  # Docker's default is 64 MiB; workers of dataloaders keep whole batches in it
# NCCL locks tens of MiB for each peer. Distributions allow 64 KiB, 8 MiB, or an eighth of the memory, which is enough.
_FEW_LOCKED_BYTES = 2**30
_OMNI_PATH = "hfi1_"  # the driver of these adapters takes nothing from nvidia_peermem
_OF_ONE_HOST = ("docker", "lo", "virbr")
# Hosts may name interfaces and adapters differently, and a rank may log more than others.
_MAY_DIFFER = re.compile(r"NCCL_(DEBUG|SOCKET_IFNAME|OOB_NET_IFNAME|IB_HCA)")
_finding = FindingTexts(Path(__file__).with_name("findings.txt")).finding


def find(
    all_facts: Sequence[Facts], unreachable: Sequence[UnreachablePort] = (), gloo_error: str | None = None
) -> list[Finding]:
    """Returns findings, errors first; the arguments are the fields of a `Meeting`."""
    findings: list[Finding] = list(_unreachable_ports(unreachable, all_facts))
    if gloo_error is not None:
        findings.append(_finding("error", "no_all_reduce", where="all hosts", error=gloo_error))
    hosts, ranks = first_of_hosts(all_facts), grouped((facts.host, facts) for facts in all_facts)
    for facts in hosts:
        of_host = [*_of_host(facts), *_too_many_threads(ranks[facts.host])]
        of_host += [*find_wrong_interfaces(facts, has_others=len(hosts) > 1), *find_in_adapters(facts)]
        shown = [finding for finding in facts.topology if finding.severity != "note"]
        of_host += [replace(finding, advice=f"{finding.advice}; commopt topo shows all") for finding in shown]
        findings += [replace(finding, where=facts.host) for finding in of_host]
    findings += _differences(all_facts)
    return worst_first(findings)


def _unreachable_ports(unreachable: Sequence[UnreachablePort], all_facts: Sequence[Facts]) -> Iterator[Finding]:
    own = {facts.host: {interface.address for interface in facts.interfaces} for facts in all_facts}
    named = {facts.host for facts in all_facts if facts.environment.get("GLOO_SOCKET_IFNAME")}
    for from_host, to_host, listening, _ in unreachable:
        # Without the variable, gloo's loopback address comes from the host's name, which has a finding of its own.
        is_known = "gloo" in listening.users and to_host not in named and _is_loopback(listening.address)
        if listening.address in own[from_host] and not is_known:
            yield _finding("error", "own_address", where=from_host, host=to_host, port=listening)
    by_hosts = grouped(
        ((from_host, to_host), f"port {port} of {address} ({interface}, which {users} would use): {reason}")
        for from_host, to_host, (interface, address, port, users), reason in unreachable
        if address not in own[from_host]
    )
    for (from_host, to_host), texts in by_hosts.items():
        yield _finding("error", "unreachable", where=from_host, host=to_host, ports="; ".join(texts))


def _of_host(facts: Facts) -> Iterator[Finding]:
    version = parse_version(facts.versions["nccl"]) if "nccl" in facts.versions else None
    yield from find_mistakes(facts.environment, version=version)
    if facts.has_gpu_driver and not facts.gpus and facts.has_gpu_files:
        yield _finding("error", "no_cuda_device", torch=facts.versions.get("torch"))
    elif facts.has_gpu_driver and not facts.gpus:
        yield _finding("warning", "no_gpu_files")
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < _SMALL_SHARED_MEMORY_BYTES:
        yield _finding("warning", "small_shared_memory", mib=facts.shared_memory_bytes / 2**20)


def _too_many_threads(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Finds that the ranks of a host have more threads than cores; each pinned rank may use only some of these."""
    num_threads, quota = sum(facts.num_threads for facts in ranks), ranks[0].quota_cores
    num_cores = len(frozenset().union(*(parse_cpus(facts.cores) for facts in ranks))) or ranks[0].num_cores
    is_limited = quota is not None and quota < num_cores
    num_cores = max(1, int(quota)) if quota is not None and is_limited else num_cores
    if (len(ranks) > 1 or is_limited) and num_threads > num_cores:
        named, best = "1 rank has" if len(ranks) == 1 else f"{len(ranks)} ranks have", max(1, num_cores // len(ranks))
        cores = count(num_cores, "core")
        yield _finding("warning", "too_many_threads", ranks=named, threads=num_threads, cores=cores, best=best)


def find_wrong_interfaces(facts: Facts, *, has_others: bool) -> Iterator[Finding]:
    """Finds interfaces that do not exist, or that other hosts, if there are any, cannot reach."""
    there = ", ".join(f"{interface.name} {interface.address}" for interface in facts.interfaces) or "none"
    named = facts.environment.get("GLOO_SOCKET_IFNAME")
    if named and facts.gloo_interface is None:
        yield _finding("error", "gloo_interface", named=named, there=there)
    elif has_others and not named and (facts.address is None or _is_loopback(facts.address)):
        yield _finding("error", "host_name", address=facts.address or "nothing")
    elif has_others and not named and not facts.is_own_address:
        yield _finding("error", "foreign_address", address=facts.address, there=there)
    named = facts.environment.get("NCCL_SOCKET_IFNAME")
    if named and facts.nccl_interface is None and (has_others or facts.gpus):
        yield _finding("error", "nccl_interface", named=named, there=there)
    elif has_others and facts.gpus and facts.nccl_interface and facts.nccl_interface.name.startswith(_OF_ONE_HOST):
        yield _finding("error", "nccl_interface_of_one_host", name=facts.nccl_interface.name, there=there)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def find_in_adapters(facts: Facts) -> Iterator[Finding]:
    """Finds what prevents the use of adapters, or slows them down; NCCL's variables may leave out some or all."""
    if facts.environment.get("NCCL_COLLNET_ENABLE") == "1" and not facts.has_sharp_plugin:
        yield _finding("warning", "no_sharp")
    if facts.environment.get("NCCL_IB_DISABLE") == "1":
        return
    ports = _ports_of_nccl(facts)
    if facts.ports and facts.gpus and not ports:
        there = ", ".join(port.name for port in facts.ports)
        yield _finding("warning", "no_adapter", named=facts.environment["NCCL_IB_HCA"], there=there)
    down = grouped((port.state, port.name) for port in ports if port.state != "ACTIVE")
    for state, names in down.items():  # in one line, as many ports of a host may not be in use
        shown = f"port {names[0]} is" if len(names) == 1 else f"ports {', '.join(names)} are"
        yield _finding("warning", "port_state", ports=shown, state=state)
    for port in ports:
        if port.errors:
            counts = ", ".join(f"{name} {count}" for name, count in port.errors.items())
            yield _finding("warning", "port_errors", name=port.name, counts=counts)
    rates = {port.name: port.rate for port in ports if port.state == "ACTIVE" and port.rate}
    if len(set(rates.values())) > 1:
        shown = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        yield _finding("warning", "unequal_rates", rates=shown)
    # Without GPUs a training uses gloo, which sends over TCP.
    if facts.gpus and any(port.state == "ACTIVE" for port in ports):
        needs_module = any(port.state == "ACTIVE" and not port.name.startswith(_OMNI_PATH) for port in ports)
        yield from _find_without_rdma(facts, needs_peer_memory=needs_module)


def _find_without_rdma(facts: Facts, *, needs_peer_memory: bool) -> Iterator[Finding]:
    """Finds why NCCL cannot use ports that are active, or not for the memory of GPUs."""
    if not facts.has_verbs_files:
        yield _finding("warning", "no_verbs_files")
        return
    if facts.max_locked_bytes is not None and facts.max_locked_bytes < _FEW_LOCKED_BYTES:
        yield _finding("error", "locked_memory", mib=facts.max_locked_bytes / 2**20)
    if needs_peer_memory and facts.has_gpu_driver and not facts.has_peer_memory and not facts.can_dma_buf:
        yield _finding("warning", "no_gdr")


def _ports_of_nccl(facts: Facts) -> list[Port]:
    """Returns the ports that ``NCCL_IB_HCA`` lets NCCL use, all without that variable.

    It has prefixes of adapters' names, or whole names after "=", with or without the number of a port; "^" excludes.
    """
    chosen = facts.environment.get("NCCL_IB_HCA", "")
    listed = chosen.removeprefix("^")
    names = [name.strip().partition(":") for name in listed.removeprefix("=").split(",") if name.strip()]

    def is_listed(port: Port) -> bool:
        adapter, _, number = port.name.partition(":")
        return any(
            wanted in ("", number) and (adapter == name if listed.startswith("=") else adapter.startswith(name))
            for name, _, wanted in names
        )

    return [port for port in facts.ports if not names or is_listed(port) != chosen.startswith("^")]


def _differences(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Compares what should be equal on all ranks."""
    compared: list[tuple[Severity, str, list[Any]]] = [
        ("error", "--hosts", [",".join(facts.hosts) for facts in all_facts]),
        ("error", "the number of ranks", [facts.world_size for facts in all_facts]),
        ("warning", "ranks on a host", [facts.ranks_per_node for facts in all_facts]),
        ("warning", "the rate of InfiniBand or RoCE ports", [_rates(facts) for facts in all_facts]),
        ("warning", "the number of GPUs of a host", [len(facts.gpus) for facts in all_facts]),
        ("warning", "the kind of GPU", [_list(facts.gpus) for facts in all_facts]),
    ]
    for name in sorted({name for facts in all_facts for name in facts.versions}, reverse=True):
        compared.insert(0, ("error", f"the version of {name}", [facts.versions.get(name) for facts in all_facts]))
    settings = {name for facts in all_facts for name in facts.environment if name.startswith("NCCL_")}
    for name in sorted(name for name in settings if not OF_ONE_RANK.match(name)):
        compared.append(("error", name, [facts.environment.get(name, "unset") for facts in all_facts]))
    for severity, name, values in compared:
        ranks = grouped((value, facts.rank) for facts, value in zip(all_facts, values, strict=True))
        if len(ranks) > 1:
            named = {"none" if value in (None, "") else value: those for value, those in ranks.items()}
            shown = ", ".join(f"{value} on {ranks_text(those)}" for value, those in named.items())
            if _MAY_DIFFER.match(name):
                yield _finding("warning", "may_differ", where="all hosts", name=name, values=shown)
            else:
                yield _finding(severity, "different", where="all hosts", name=name, values=shown)


def _rates(facts: Facts) -> str:
    return _list(port.rate for port in _ports_of_nccl(facts) if port.state == "ACTIVE")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
