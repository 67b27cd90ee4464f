"""What is wrong with InfiniBand and RoCE adapters, GPUDirect RDMA and SHARP; and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_commopt.doctor.facts import Facts
from lightning_commopt.doctor.finding import Finding


def find_in_adapters(facts: Facts) -> Iterator[Finding]:
    """Finds what keeps adapters from being used, or slows them down."""
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
    yield from _unequal_rates(facts)
    if facts.ports and facts.max_locked_bytes is not None:
        yield Finding(
            "error",
            facts.host,
            f"a process may lock {facts.max_locked_bytes / 2**20:.0f} MiB of memory: InfiniBand needs more",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    if facts.ports and facts.gpus and not facts.has_peer_memory and not facts.can_dma_buf:
        yield Finding(
            "warning",
            facts.host,
            "no GPUDirect RDMA: nvidia_peermem is not loaded, and DMA-BUF needs Linux 5.12 and NVIDIA's open modules",
            "modprobe nvidia_peermem; commopt nccl-log shows whether NCCL uses GDRDMA",
        )
    if facts.environment.get("NCCL_COLLNET_ENABLE") == "1" and not facts.has_sharp_plugin:
        yield Finding(
            "warning",
            facts.host,
            "NCCL_COLLNET_ENABLE=1, and no libnccl-net.so, without which NCCL has no SHARP",
            "put nccl-rdma-sharp-plugins (HPC-X) on LD_LIBRARY_PATH; 'CollNet' in NCCL's log says that it is used",
        )


def _unequal_rates(facts: Facts) -> Iterator[Finding]:
    rates = {port.name: port.rate for port in facts.ports if port.state == "ACTIVE" and port.rate}
    if len(set(rates.values())) > 1:
        yield Finding(
            "warning",
            facts.host,
            f"ports run at different rates: {', '.join(f'{name} {rate}' for name, rate in rates.items())}",
            "check cables and switch ports; if the slow ones are for storage, leave them out with NCCL_IB_HCA",
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
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
