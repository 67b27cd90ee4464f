"""Findings about networks between hosts: TCP instead of RDMA, no GPUDirect, CollNet and NICs that are not used."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_commopt.commands.nccl_log.facts import Communicator, Connection, Process
from lightning_commopt.commands.nccl_log.finding import (
    Reason,
    first_of,
    lines,
    pairs_of,
    pairs_text,
    processes_of,
    setting,
    switched_off,
    switched_on,
)
from lightning_commopt.commands.nccl_log.paths import ends_of, is_in_host, select
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import ranks_text

_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "tun", "tap", "wlan")


def find_slow_networks(communicator: Communicator) -> Iterator[Finding]:
    """Finds what keeps the traffic between hosts slow."""
    for find in (_find_sockets, _find_virtual_interface, _find_no_gdr, _find_collnet, _find_few_nics):
        yield from find(communicator)


def _find_sockets(communicator: Communicator) -> Iterator[Finding]:
    found = select(communicator, lambda each: each.method == "Socket" and is_in_host(communicator, each) is not True)
    if not found:
        return
    ends = ends_of(communicator, found)
    reason = _socket_reason(ends)
    names = sorted({name for process in ends for name in process.interfaces})
    interfaces = f", {', '.join(names[:4])}" if names else ""
    yield Finding(
        code="socket_network",
        severity="slow",
        what=f"{pairs_text(pairs_of(found))} talk over TCP ({found[0].path}{interfaces})",
        why=reason.why,
        advice=f"{reason.advice}; on TCP alone, compress: bf16, int8 and PowerSGD pay most here",
        evidence=lines(found[0].line, *reason.evidence),
    )


def _socket_reason(ends: list[Process]) -> Reason:
    """Returns why ranks do not use RDMA."""
    no_ib, forced = switched_on(ends, "NCCL_IB_DISABLE"), setting(ends, "NCCL_NET")
    chosen, no_device = setting(ends, "NCCL_IB_HCA"), first_of(ends, "no_ib")
    no_library = first_of(ends, "no_ibverbs")
    nics = {name: line for process in ends for name, line in process.nics.items()}
    unset = "unset it where the hosts have InfiniBand or RoCE"
    if no_ib:
        return Reason(f"the environment sets NCCL_IB_DISABLE={no_ib.value}", unset, lines(no_ib))
    if forced and forced.value.lower() == "socket":
        return Reason("the environment sets NCCL_NET=Socket", unset, lines(forced))
    if no_library:
        advice = "install libibverbs (rdma-core) in the image, if the hosts have InfiniBand or RoCE"
        return Reason("libibverbs cannot be loaded", advice, lines(no_library))
    if no_device and chosen:
        why = f"NET/IB found no device: NCCL_IB_HCA={chosen.value} may match none"
        advice = "compare NCCL_IB_HCA with ibv_devinfo, and check that a port is Active (ibstat)"
        return Reason(why, advice, lines(no_device, chosen))
    if no_device:
        why = "NET/IB found no device: there is none, its port is down, or the container lacks /dev/infiniband"
        advice = "ibstat; containers need --device=/dev/infiniband --ulimit memlock=-1; clouds have plugins for NCCL"
        return Reason(why, advice, lines(no_device))
    if nics:
        why = f"NCCL saw {', '.join(sorted(nics)[:4])} but does not use them: another plugin or NCCL_NET decides"
        advice = "read the lines with NET/ and Using network; set NCCL_NET=IB to see the error"
        return Reason(why, advice, lines(next(iter(nics.values())), forced))
    why = "the log does not say why NCCL has no faster network; NCCL_DEBUG_SUBSYS=INIT,NET,ENV would"
    return Reason(why, "ibstat on the host; in a cloud, install its NCCL plugin")


def _find_virtual_interface(communicator: Communicator) -> Iterator[Finding]:
    if not _spans_hosts(communicator):
        return
    for process in processes_of(communicator):
        for name in (process.interface, *process.interfaces):
            if (name == "lo" or name.startswith(_VIRTUAL)) and len(process.interfaces) <= 1:
                chosen = process.settings.get("NCCL_SOCKET_IFNAME")
                why = (
                    f"the environment sets NCCL_SOCKET_IFNAME={chosen.value}"
                    if chosen
                    else "NCCL took the first that is up"
                )
                yield Finding(
                    code="virtual_interface",
                    severity="error",
                    what=f"{process.host or 'a process'} offers peers on other hosts the interface {name}",
                    why=f"{why}; others can hardly reach it",
                    advice="set NCCL_SOCKET_IFNAME to the interface that the hosts share, as eth0 or ib0 (ip -br addr)",
                    evidence=lines(chosen, process.bootstrap, process.interfaces.get(name)),
                )
                return


def _spans_hosts(communicator: Communicator) -> bool:
    """Returns whether there are several hosts, as NCCL counts them; before it has counted, as the log names them."""
    if communicator.num_nodes is not None:
        return communicator.num_nodes > 1
    return len({machine.host for machine in communicator.machines}) > 1


def _find_no_gdr(communicator: Communicator) -> Iterator[Finding]:
    rdma = select(communicator, lambda each: each.kind == "NET" and each.method != "Socket")
    without = [each for each in rdma if not each.has_gdr]
    if not without:
        return
    reason = _gdr_reason(rdma, without, ends_of(communicator, without))
    share = f"{len(without)} of {len(rdma)} connections" if len(without) < len(rdma) else "all connections"
    yield Finding(
        code="no_gdr",
        severity="slow",
        what=f"{share} over NET/{without[0].method} work without GPUDirect RDMA: {pairs_text(pairs_of(without))}",
        why=reason.why,
        advice=reason.advice,
        evidence=lines(without[0].line, *reason.evidence),
    )


def _gdr_reason(rdma: list[Connection], without: list[Connection], ends: list[Process]) -> Reason:
    """Returns why NICs do not read and write GPUs' memory, on some connections or on all."""
    level = setting(ends, "NCCL_NET_GDR_LEVEL") or setting(ends, "NCCL_IB_GDR_LEVEL")
    no_read, disabled = switched_off(ends, "NCCL_NET_GDR_READ"), first_of(ends, "gdr_disabled")
    sends_only = all(each.direction == "send" for each in without)
    is_partial = len(without) < len(rdma)
    if sends_only and no_read:
        why = "the environment sets NCCL_NET_GDR_READ=0: sends are staged in host memory"
        return Reason(why, "unset it", lines(no_read))
    if sends_only and is_partial:
        why = "only sends are staged in host memory: without NVLink NCCL lets NICs write to GPUs but not read from them"
        return Reason(why, "measure NCCL_NET_GDR_READ=1")
    if level and level.value.upper() in ("LOC", "0", "-1"):
        why = f"the environment sets NCCL_NET_GDR_LEVEL={level.value}"
        return Reason(why, "unset it, or PHB or SYS for more distance", lines(level))
    if disabled and "distance" in disabled.text:
        why = "NIC and GPU are too far apart: on different PCIe switches, or on different sockets"
        advice = "pair each GPU with the NIC near it (nvidia-smi topo -m), or measure NCCL_NET_GDR_LEVEL=SYS"
        return Reason(why, advice, lines(disabled))
    if not without[0].method.startswith("IB"):
        why = f"the network plugin ({without[0].method}) offers no GPUDirect RDMA for these GPUs or this machine"
        return Reason(
            why, "its manual names GPUs and machines that have it; a newer plugin or driver may", lines(disabled)
        )
    if (disabled and "for HCA" in disabled.text) or not (first_of(ends, "dmabuf") or is_partial):
        why = "the kernel offers no GPUDirect RDMA: nvidia-peermem is not loaded, and NCCL found no DMA-BUF"
        why += "" if disabled else "; or NIC and GPU are on different sockets"
        advice = "modprobe nvidia-peermem on every host (lsmod | grep peermem); nvidia-smi topo -m for the distance"
        return Reason(why, advice, lines(disabled))
    why = "NIC and GPU are on different sockets or switches, or nvidia-peermem is missing"
    return Reason(why, "nvidia-smi topo -m; lsmod | grep peermem; measure NCCL_NET_GDR_LEVEL=SYS", lines(level))


def _find_collnet(communicator: Communicator) -> Iterator[Finding]:
    members, processes = list(communicator.members.values()), processes_of(communicator)
    wanted = switched_on(processes, "NCCL_COLLNET_ENABLE")
    ready = [m for m in members if m.finished is not None]
    if wanted and ready and not any("collnet" in m.notes for m in members) and _spans_hosts(communicator):
        sharp = any("SHARP" in name for process in processes for name in process.nics)
        yield Finding(
            code="collnet_unused",
            severity="note",
            what="NCCL_COLLNET_ENABLE is set, but no rank connected CollNet",
            why="the plugin found SHARP ports, so the fabric or its aggregation manager refused"
            if sharp
            else "CollNet needs a plugin with SHARP (nccl-rdma-sharp-plugins) and switches that have it",
            advice="put the plugin's libnccl-net.so on LD_LIBRARY_PATH; ask the fabric's administrator for sharp_am",
            evidence=lines(wanted, first_of(processes, "no_plugin")),
        )


def _find_few_nics(communicator: Communicator) -> Iterator[Finding]:
    for machine, ranks in communicator.machines.items():
        processes = processes_of(communicator, ranks)
        nics = {name: line for process in processes for name, line in process.nics.items()}
        here = [c for rank in ranks for c in communicator.members[rank].connections.values() if c.kind == "NET"]
        used = {each.nic for each in here}
        complete = all(communicator.members[rank].finished for rank in ranks)
        if complete and here and here[0].method != "Socket" and len(used) < min(len(nics), len(ranks)):
            chosen = setting(processes, "NCCL_IB_HCA")
            channels = len({each.channel for each in here})
            why = f"{channels} channel(s) cross hosts, and each takes one NIC of a rank" if channels < len(nics) else ""
            why = why or "NCCL takes the NICs that are nearest to the GPUs; others may be slower, or down"
            yield Finding(
                code="few_nics",
                severity="note",
                what=f"{machine.host}: {len(used)} of {len(nics)} NICs carry the traffic of {ranks_text(ranks)}",
                why=why,
                advice="nvidia-smi topo -m for the NICs' places; measure NCCL_CROSS_NIC=1 and NCCL_MIN_NCHANNELS",
                evidence=lines(here[0].line, *list(nics.values())[:1], chosen),
            )
            return
