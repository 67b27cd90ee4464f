"""What is wrong with the hosts of a run, the worst first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_commopt.doctor.adapter_findings import find_in_adapters
from lightning_commopt.doctor.doors import ClosedDoor
from lightning_commopt.doctor.facts import Facts
from lightning_commopt.doctor.interface_findings import find_wrong_interfaces
from lightning_commopt.findings import Finding, Severity, worst_first
from lightning_commopt.formatting import ranks_text
from lightning_commopt.links.nccl_environment import find_mistakes, parse_version
from lightning_commopt.links.nccl_variables import names_in_library

_SMALL_SHARED_MEMORY_BYTES = 2**30
_SHARED_INTERFACE = (
    "set GLOO_SOCKET_IFNAME to the interface between the hosts; TORCH_DISTRIBUTED_DEBUG=DETAIL says more"
)
_OPEN_PORTS = (
    "open all TCP ports between the hosts (firewall, security group): gloo and NCCL take any; or set GLOO_SOCKET_IFNAME"
    " and NCCL_SOCKET_IFNAME to an interface that both reach"
)


def find(everybody: Sequence[Facts], closed: Sequence[ClosedDoor] = (), gloo_error: str | None = None) -> list[Finding]:
    """Returns what is wrong, errors first.

    Args:
        everybody: the facts of every rank; of one alone without a launcher.
        closed: connections between hosts that failed.
        gloo_error: what an all-reduce over gloo failed with.
    """
    found: list[Finding] = list(_closed_doors(closed))
    if gloo_error is not None:
        what = f"an all-reduce over gloo fails: {gloo_error}"
        found.append(Finding(severity="error", where="all hosts", what=what, advice=_SHARED_INTERFACE))
    hosts = list({facts.host: facts for facts in reversed(everybody)}.values())[::-1]
    for facts in hosts:
        found += _of_host(facts)
        if len(hosts) > 1:
            found += find_wrong_interfaces(facts)
        found += find_in_adapters(facts)
        found += _of_topology(facts)
    found += _differences(everybody)
    return worst_first(found)


def _closed_doors(closed: Sequence[ClosedDoor]) -> Iterator[Finding]:
    pairs: dict[tuple[str, str], list[ClosedDoor]] = defaultdict(list)
    for each in closed:
        pairs[each.from_host, each.to_host].append(each)
    for (one, other), doors in pairs.items():
        shown = "; ".join(
            f"port {each.door.port} of {each.door.address} ({each.door.interface}, which {each.door.users} would take):"
            f" {each.reason}"
            for each in doors
        )
        yield Finding(severity="error", where=one, what=f"cannot reach {other} at {shown}", advice=_OPEN_PORTS)


def _of_topology(facts: Facts) -> Iterator[Finding]:
    """Passes on what ``commopt topo`` finds."""
    for each in facts.topology:
        if each.severity != "note":
            yield replace(each, where=facts.host, advice=f"{each.advice}; commopt topo shows all")


def _of_host(facts: Facts) -> Iterator[Finding]:
    yield from _packages_and_variables(facts)
    if facts.has_gpu_driver and not facts.gpus:
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"NVIDIA's driver is loaded, but torch {facts.versions.get('torch')} finds no CUDA device",
            advice="install a torch that is built for CUDA and for this driver; check CUDA_VISIBLE_DEVICES",
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < _SMALL_SHARED_MEMORY_BYTES:
        yield Finding(
            severity="warning",
            where=facts.host,
            what=f"/dev/shm has {facts.shared_memory_bytes / 2**20:.0f} MiB: NCCL and the workers of dataloaders need"
            " more",
            advice="docker run --ipc=host, or --shm-size=8g; in Kubernetes a memory volume at /dev/shm",
        )
    num_threads = facts.num_threads * facts.ranks_per_node
    if facts.ranks_per_node > 1 and num_threads > facts.num_cores:
        yield Finding(
            severity="warning",
            where=facts.host,
            what=f"{facts.ranks_per_node} ranks with {facts.num_threads} threads each share {facts.num_cores} cores",
            advice=f"OMP_NUM_THREADS={max(1, facts.num_cores // facts.ranks_per_node)}",
        )


def _packages_and_variables(facts: Facts) -> Iterator[Finding]:
    version = parse_version(facts.versions["nccl"]) if "nccl" in facts.versions else None
    if find_mistakes(facts.environment, version=version):
        for mistake in find_mistakes(facts.environment, version=version, known=names_in_library()):
            yield replace(mistake, where=facts.host)


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
    everybody: Sequence[Facts],
    what: str,
    values: Sequence[Any],
    severity: Severity = "error",
) -> Iterator[Finding]:
    ranks: dict[Any, list[int]] = defaultdict(list)
    for facts, value in zip(everybody, values, strict=True):
        ranks[value].append(facts.rank)
    if len(ranks) > 1:
        shown = [f"{'none' if value in (None, '') else value} on {ranks_text(those)}" for value, those in ranks.items()]
        message = f"{what} differs: {', '.join(shown)}"
        yield Finding(severity=severity, where="all hosts", what=message, advice="make it the same everywhere")
