"""What is wrong with InfiniBand and RoCE adapters, GPUDirect RDMA and SHARP; and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.findings import Finding
from lightning_commopt.formatting import list_some


def find_in_adapters(facts: Facts) -> Iterator[Finding]:
    """Finds what keeps adapters from being used, or slows them down."""
    for port in facts.ports:
        if port.state != "ACTIVE":
            yield Finding(
                severity="warning",
                where=facts.host,
                what=f"port {port.name} is {port.state}",
                advice="check the cable and the subnet manager, or leave the port out with NCCL_IB_HCA",
            )
        if port.errors:
            counts = ", ".join(f"{name} {count}" for name, count in port.errors.items())
            yield Finding(
                severity="warning",
                where=facts.host,
                what=f"port {port.name} has counted errors since it was reset: {counts}",
                advice="look whether they grow while you train; if so, change the cable or the transceiver",
            )
    yield from _unequal_rates(facts)
    if facts.ports and facts.max_locked_bytes is not None:
        yield Finding(
            severity="error",
            where=facts.host,
            what=f"a process may lock {facts.max_locked_bytes / 2**20:.0f} MiB of memory: InfiniBand needs more",
            advice="ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    if facts.ports and facts.gpus and not facts.has_peer_memory and not facts.can_dma_buf:
        yield Finding(
            severity="warning",
            where=facts.host,
            what="no GPUDirect RDMA: nvidia_peermem is not loaded, and DMA-BUF needs Linux 5.12 and NVIDIA's open"
            " modules",
            advice="modprobe nvidia_peermem; commopt nccl-log shows whether NCCL uses GDRDMA",
        )
    if facts.environment.get("NCCL_COLLNET_ENABLE") == "1" and not facts.has_sharp_plugin:
        yield Finding(
            severity="warning",
            where=facts.host,
            what="NCCL_COLLNET_ENABLE=1, and no libnccl-net.so, without which NCCL has no SHARP",
            advice="put nccl-rdma-sharp-plugins (HPC-X) on LD_LIBRARY_PATH; 'CollNet' in NCCL's log shows that it is"
            " used",
        )


def _unequal_rates(facts: Facts) -> Iterator[Finding]:
    rates = {port.name: port.rate for port in facts.ports if port.state == "ACTIVE" and port.rate}
    if len(set(rates.values())) > 1:
        yield Finding(
            severity="warning",
            where=facts.host,
            what=f"ports run at different rates: {', '.join(f'{name} {rate}' for name, rate in rates.items())}",
            advice="check cables and switch ports; if the slow ones are for storage, leave them out with NCCL_IB_HCA",
        )


def list_unchecked(everybody: Sequence[Facts]) -> list[str]:
    """Returns what was not looked at, and why."""
    hosts = {facts.host: facts for facts in reversed(everybody)}
    found = []
    if len(hosts) == 1:
        found.append("connections to other hosts: torchrun, srun or --hosts a,b on each host")
    if without := _names(facts for facts in hosts.values() if facts.no_topology is not None):
        found.append(f"links between GPUs: no GPU on {without}")
    if without := _names(facts for facts in hosts.values() if not facts.ports):
        found.append(f"InfiniBand, RoCE and GPUDirect RDMA: no adapter in /sys/class/infiniband of {without}")
    elif not any(facts.environment.get("NCCL_COLLNET_ENABLE") == "1" for facts in everybody):
        found.append("SHARP: NCCL_COLLNET_ENABLE is not 1")
    return found


def _names(some: Iterator[Facts]) -> str:
    names = [facts.host for facts in some][::-1]
    return list_some(names)
