"""Findings about networks between hosts: TCP instead of RDMA, no GPUDirect, CollNet and NICs that are not used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_commopt.commands.nccl_log.facts import Communicator, Connection, Fact, Process
from lightning_commopt.commands.nccl_log.finding import (
    Reason,
    finding,
    first_of,
    lines,
    pairs_of,
    pairs_text,
    processes_of,
    setting,
    spans_hosts,
    switched_on,
)
from lightning_commopt.commands.nccl_log.paths import ends_of, is_in_host, select
from lightning_commopt.text.findings import Finding, Severity
from lightning_commopt.text.formatting import list_some

_VIRTUAL = re.compile(
    r"docker|virbr|br-|veth|cni|flannel|cali|tun|tap|wl|wg|tailscale|zt|cloudflare|vmnet|lxc|kube|nodelocal",
    re.IGNORECASE,
)
_LINK_LOCAL = ("fe80", "169.254.")


def _find_sockets(communicator: Communicator) -> Iterator[Finding]:
    found = select(communicator, lambda each: each.method == "Socket" and is_in_host(communicator, each) is not True)
    processes = ends_of(communicator, found) if found else processes_of(communicator)
    networks = [each.network for each in processes if each.network is not None]
    chosen = next((each for each in networks if each.value != "Socket"), networks[0] if networks else None)
    several = spans_hosts(communicator)
    if chosen is None and several and (no_ib := switched_on(processes, "NCCL_IB_DISABLE")):
        chosen = Fact("Socket", no_ib.line)  # only a plugin would change that
    is_tcp = chosen is not None and chosen.value == "Socket"
    if not found and not (is_tcp and several is not False and not communicator.connections):
        return
    reason = _socket_reason(processes)
    names = sorted({name for process in processes for name in process.interfaces})
    interfaces = f", {', '.join(names[:4])}" if names else ""
    if found:
        what = f"{pairs_text(pairs_of(found))} talk over TCP ({found[0].path}{interfaces})"
    else:
        when = "hosts talk" if several else "if there are several hosts, they talk"
        what = f"{when} over TCP (network Socket{interfaces})"
    advice = f"{reason.advice}; on TCP alone, compress: bf16, int8 and PowerSGD pay most here"
    severity: Severity = "slow" if found or several else "note"
    reason = reason._replace(advice=advice)
    yield finding(severity, "socket_network", what, reason, *found[:1], None if found else chosen)


def _socket_reason(ends: list[Process]) -> Reason:
    """Returns why ranks do not use RDMA."""
    no_ib, forced = switched_on(ends, "NCCL_IB_DISABLE"), setting(ends, "NCCL_NET")
    chosen, no_device = setting(ends, "NCCL_IB_HCA"), first_of(ends, "no_ib")
    no_library, no_open = first_of(ends, "no_ibverbs"), first_of(ends, "no_open")
    nics = {name: line for process in ends for name, line in process.nics.items()}
    unset = "unset it where the hosts have InfiniBand or RoCE"
    if no_ib:
        return Reason(f"the environment sets NCCL_IB_DISABLE={no_ib.value}", unset, lines(no_ib))
    if forced and forced.value.lower() == "socket":
        return Reason("the environment sets NCCL_NET=Socket", unset, lines(forced))
    if no_library:
        advice = "install libibverbs (rdma-core) in the image, if the hosts have InfiniBand, RoCE or EFA"
        return Reason("libibverbs cannot be loaded, so NCCL has no RDMA", advice, lines(no_library))
    if no_open:
        why = "NCCL may not open the NIC: the container has no access to it, or other drivers than the host"
        advice = "--device=/dev/infiniband --ulimit memlock=-1, the host's rdma-core in the image; ibv_devinfo in it"
        return Reason(why, advice, lines(no_open))
    if no_device:
        none = f"NCCL_IB_HCA={chosen.value} may match none" if chosen else "there is none"
        why = f"NET/IB found no device: {none}, its port is down, or the container lacks /dev/infiniband"
        advice = "ibstat; containers need --device=/dev/infiniband --ulimit memlock=-1; clouds have plugins for NCCL"
        return Reason(why, advice, lines(no_device, chosen))
    if nics:
        why = f"NCCL saw {', '.join(sorted(nics)[:4])} but does not use them: another plugin or NCCL_NET decides"
        advice = "read the lines with NET/ and Using network; set NCCL_NET=IB to see the error"
        return Reason(why, advice, lines(next(iter(nics.values())), forced))
    why = "unknown: the log does not say why NCCL has no faster network; NCCL_DEBUG_SUBSYS=INIT,NET,ENV would"
    return Reason(why, "ibstat on the host; in a cloud, install its NCCL plugin")


def _find_virtual_interface(communicator: Communicator) -> Iterator[Finding]:
    if not spans_hosts(communicator):
        return
    for process in processes_of(communicator):
        usable = {name: fact for name, fact in process.interfaces.items() if not _is_unreachable(name, fact.value)}
        is_tcp = process.network is None or process.network.value == "Socket"
        for name in dict.fromkeys((process.interface, *(process.interfaces if is_tcp else ()))):
            fact = process.interfaces.get(name)
            address = fact.value if fact else process.address
            if not name or not _is_unreachable(name, address):
                continue
            chosen = process.settings.get("NCCL_SOCKET_IFNAME")
            why = f"the environment sets NCCL_SOCKET_IFNAME={chosen.value}" if chosen else "NCCL took what is up"
            kind = "link-local address" if address.startswith(_LINK_LOCAL) else "virtual interface"
            names = ",".join(usable) or "the interface that the hosts share, as eth0 or ib0 (ip -br addr)"
            what = f"{process.host or 'a process'} offers peers on other hosts the interface {name} ({address})"
            why = f"{why}; others can hardly reach it ({kind})"
            advice = f"set NCCL_SOCKET_IFNAME to {names}"
            severity: Severity = "warning" if usable else "error"
            reason = Reason(why, advice)
            yield finding(severity, "virtual_interface", what, reason, chosen, process.bootstrap, fact)
            return


def _is_unreachable(name: str, address: str) -> bool:
    return name == "lo" or _VIRTUAL.match(name) is not None or address.startswith(_LINK_LOCAL)


def _find_no_gdr(communicator: Communicator) -> Iterator[Finding]:
    rdma = select(communicator, lambda each: each.kind == "NET" and each.method != "Socket")
    without = [each for each in rdma if not each.has_gdr]
    ends = ends_of(communicator, without) if without else processes_of(communicator)
    disabled = {name: line for process in ends for name, line in process.gdr.items() if "isabled" in line.text}
    if not without and (not disabled or rdma or spans_hosts(communicator) is False):
        return
    reason = _gdr_reason(rdma, without, ends)
    if without:
        share = f"{len(without)} of {len(rdma)} connections" if len(without) < len(rdma) else "all connections"
        what = f"{share} over NET/{without[0].method} work without GPUDirect RDMA: {pairs_text(pairs_of(without))}"
    else:
        what = f"NCCL disabled GPUDirect RDMA for {list_some(list(disabled))}"
    severity: Severity = "slow" if without or spans_hosts(communicator) else "note"
    yield finding(severity, "no_gdr", what, reason, *without[:1])


def _gdr_reason(rdma: list[Connection], without: list[Connection], ends: list[Process]) -> Reason:
    """Returns why NICs do not read and write GPUs' memory, on some connections or on all."""
    level = setting(ends, "NCCL_NET_GDR_LEVEL") or setting(ends, "NCCL_IB_GDR_LEVEL")
    no_read, disabled = switched_on(ends, "NCCL_NET_GDR_READ", on=False), first_of(ends, "gdr_disabled")
    sends_only = bool(without) and all(each.direction == "send" for each in without)
    is_partial = len(without) < len(rdma)
    nics = {name: line for process in ends for name, line in process.nics.items()}
    method = without[0].method if without else "IB"
    if sends_only and no_read:
        why = "the environment sets NCCL_NET_GDR_READ=0: sends are staged in host memory"
        return Reason(why, "unset it", lines(no_read))
    if sends_only and is_partial:
        why = "only sends are staged in host memory: without NVLink NCCL lets NICs write to GPUs but not read from them"
        return Reason(why, "measure NCCL_NET_GDR_READ=1")
    if level and level.value.upper() in ("LOC", "0", "-1"):
        why = f"the environment sets NCCL_NET_GDR_LEVEL={level.value}"
        return Reason(why, "unset it, or PHB or SYS for more distance", lines(level))
    if omni_path := next((line for name, line in nics.items() if name.startswith("hfi")), None):
        why = "Omni-Path (hfi1) has no GPUDirect RDMA by libibverbs, which NCCL uses here"
        return Reason(why, "nvidia-peermem does not help; see the vendor's plugin for NCCL (PSM2)", lines(omni_path))
    if disabled and "distance" in disabled.text:
        why = "NIC and GPU are too far apart: on different PCIe switches, or on different sockets"
        advice = "pair each GPU with the NIC near it (nvidia-smi topo -m), or measure NCCL_NET_GDR_LEVEL=SYS"
        return Reason(why, advice, lines(disabled))
    if not method.startswith("IB") or (disabled and "HCA" not in disabled.text):
        unknown = "" if disabled else "unknown: perhaps "
        why = f"{unknown}the network plugin ({method}) offers no GPUDirect RDMA for these GPUs or this machine"
        return Reason(why, "its manual names GPUs and machines that have it; a newer plugin or driver", lines(disabled))
    said = [*(line for end in ends for line in end.notes.values()), *(end.version.line for end in ends if end.version)]
    if any("rccl" in line.text.lower() for line in said):
        why = "the kernel offers RCCL no GPUDirect RDMA" if disabled else "unknown: the log does not say why"
        return Reason(why, "rocm-smi --showtopo; measure NCCL_DMABUF_ENABLE=1; ROCm's manual", lines(disabled))
    if disabled:
        why = "the kernel offers no GPUDirect RDMA: nvidia-peermem is not loaded, and NCCL found no DMA-BUF"
        why += "" if "no module" in disabled.text else "; or it is loaded but not registered with the NIC's driver"
        advice = "modprobe nvidia-peermem on every host (lsmod | grep peermem; /sys/kernel/mm/memory_peers); reinstall"
        return Reason(why, f"{advice} it after OFED; nvidia-smi topo -m for the distance", lines(disabled))
    why = "unknown: the log does not say why: nvidia-peermem is missing, or NIC and GPU are on different sockets"
    return Reason(why, "nvidia-smi topo -m; lsmod | grep peermem; measure NCCL_NET_GDR_LEVEL=SYS", lines(level))


SLOW_NETWORKS = (_find_sockets, _find_virtual_interface, _find_no_gdr)
"""Each finds something that keeps the traffic between hosts slow."""
