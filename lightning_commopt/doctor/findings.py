"""What is wrong with the hosts of a run, the worst first."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.links.nccl_environment import find_mistakes, parse_version
from lightning_commopt.links.nccl_variables import names_in_library

_SMALL_SHARED_MEMORY_BYTES = 2**30
_RANKS_IN_MESSAGE = 8


class Finding(NamedTuple):
    """Something that keeps ranks from training together, or slows them down.

    Attributes:
        severity: "error" where training will fail, hang, or be wrong; "warning" where it may, or will be slow.
        where: hosts or ranks.
        message: what it is.
        remedy: what to do.
    """

    severity: Literal["error", "warning"]
    where: str
    message: str
    remedy: str


def find(everybody: Sequence[Facts]) -> list[Finding]:
    """Returns what is wrong, errors first.

    Args:
        everybody: the facts of every rank; of one alone without a launcher.
    """
    found: list[Finding] = []
    hosts = list({facts.host: facts for facts in everybody}.values())
    for facts in hosts:
        found += _of_host(facts, is_alone=len(hosts) == 1)
    found += _differences(everybody)
    return sorted(dict.fromkeys(found), key=lambda finding: finding.severity)


def _of_host(facts: Facts, *, is_alone: bool) -> Iterator[Finding]:
    yield from _packages_and_variables(facts)
    if facts.has_gpu_driver and not facts.gpus:
        yield Finding(
            "error",
            facts.host,
            f"NVIDIA's driver is loaded, but torch {facts.versions.get('torch')} finds no CUDA device",
            "install a torch that is built for CUDA and for this driver; check CUDA_VISIBLE_DEVICES",
        )
    if not is_alone and (facts.address is None or ipaddress.ip_address(facts.address).is_loopback):
        yield Finding(
            "error",
            facts.host,
            f"the host's name resolves to {facts.address or 'nothing'}, which other hosts cannot reach",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the hosts, or mend /etc/hosts",
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < _SMALL_SHARED_MEMORY_BYTES:
        yield Finding(
            "warning",
            facts.host,
            f"/dev/shm has {facts.shared_memory_bytes / 2**20:.0f} MiB: NCCL and the workers of dataloaders need more",
            "docker run --ipc=host, or --shm-size=8g; in Kubernetes a memory volume at /dev/shm",
        )
    num_threads = facts.num_threads * facts.ranks_per_node
    if facts.ranks_per_node > 1 and num_threads > facts.num_cores:
        yield Finding(
            "warning",
            facts.host,
            f"{facts.ranks_per_node} ranks with {facts.num_threads} threads each share {facts.num_cores} cores",
            f"OMP_NUM_THREADS={max(1, facts.num_cores // facts.ranks_per_node)}",
        )
    yield from _adapters(facts)


def _packages_and_variables(facts: Facts) -> Iterator[Finding]:
    for advisory in facts.advisories:
        yield Finding("error", facts.host, advisory, "change the version")
    version = parse_version(facts.versions["nccl"]) if "nccl" in facts.versions else None
    if find_mistakes(facts.environment, version=version):
        for mistake in find_mistakes(facts.environment, version=version, known=names_in_library()):
            yield Finding("error", facts.host, mistake.message, f"correct or unset {mistake.name}")


def _adapters(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        if port.state != "ACTIVE":
            yield Finding(
                "warning",
                facts.host,
                f"port {port.name} is {port.state}",
                "check the cable and the subnet manager, or leave the port out with NCCL_IB_HCA",
            )
        if port.errors:
            counts = ", ".join(f"{name} {count}" for name, count in port.errors.items())
            yield Finding(
                "warning",
                facts.host,
                f"port {port.name} has counted errors since it was reset: {counts}",
                "look whether they grow while you train; if so, change the cable or the transceiver",
            )
    if facts.ports and facts.max_locked_bytes is not None:
        yield Finding(
            "error",
            facts.host,
            f"a process may lock {facts.max_locked_bytes / 2**20:.0f} MiB of memory: InfiniBand needs more",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    if facts.ports and facts.gpus and not facts.has_peer_memory:
        yield Finding(
            "warning",
            facts.host,
            "the kernel module nvidia_peermem is not loaded: without dma-buf there is no GPUDirect RDMA",
            "modprobe nvidia_peermem; commopt nccl-log shows whether NCCL uses GDRDMA",
        )


def _differences(everybody: Sequence[Facts]) -> Iterator[Finding]:
    """Compares what should be equal on all ranks."""
    for name in _names(facts.versions for facts in everybody):
        yield from _different(everybody, f"the version of {name}", [facts.versions.get(name) for facts in everybody])
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
    severity: Literal["error", "warning"] = "error",
) -> Iterator[Finding]:
    ranks: dict[Any, list[int]] = defaultdict(list)
    for facts, value in zip(everybody, values, strict=True):
        ranks[value].append(facts.rank)
    if len(ranks) > 1:
        shown = [f"{'none' if value in (None, '') else value} on {_ranks(those)}" for value, those in ranks.items()]
        message = f"{what} differs: {', '.join(shown)}"
        yield Finding(severity, "all hosts", message, "make it the same everywhere")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_IN_MESSAGE])) + (" ..." if len(ranks) > _RANKS_IN_MESSAGE else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
