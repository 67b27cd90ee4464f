"""Findings about the network between hosts: TCP instead of RDMA, no GPUDirect RDMA, interfaces out of reach."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commopt_diagnose.findings import Reason
from commopt_diagnose.nccl_log.communicators import Communicator
from commopt_diagnose.nccl_log.facts import Connection, Fact, Process
from commopt_diagnose.nccl_log.paths import (
    ends_of,
    finding,
    first_of,
    is_in_host,
    pairs_text,
    reason,
    setting,
    switched_on,
)
from lightning_commopt.text.findings import Finding, Line, Severity
from lightning_commopt.text.formatting import list_some

_VIRTUAL = re.compile(r"docker|virbr|br-|veth|cni|flannel|cali|vmnet|lxc|kube|nodelocal", re.IGNORECASE)
_PRIVATE = re.compile(r"tun|tap|wl|wg|tailscale|zt|cloudflare", re.IGNORECASE)  # VPNs and Wi-Fi, which others may share
_LINK_LOCAL = ("fe80", "169.254.")
# NCCL's own transport, Google's form of it, and both names of HPC-X's plugin (IBext)
_VERBS = ("IB", "gIB", "NCCL RDMA Plugin")
_GB10_BUS = "f01000"  # the PCI address 000f:01:00.0, as NCCL prints it
_TCP = ("Socket", "FastSocket")  # NCCL's own transport, and Google's plugin


def _is_tcp(network: str, processes: list[Process]) -> bool:
    """Returns whether a network is TCP: NCCL's own transport, Google's, or the plugin for libfabric over it."""
    return network in _TCP or ("ibfabric" in network and first_of(processes, "ofi_tcp") is not None)


def _find_sockets(communicator: Communicator) -> Iterator[Finding]:
    all_processes = communicator.processes
    sockets = [connection for connection in communicator.connections if _is_tcp(connection.method, all_processes)]
    between_hosts = [connection for connection in sockets if is_in_host(communicator, connection) is not True]
    processes = ends_of(communicator, between_hosts) if between_hosts else all_processes
    networks = [process.network for process in processes if process.network is not None]
    chosen = next((network for network in networks if network.value != "Socket"), networks[0] if networks else None)
    several = communicator.spans_hosts
    if chosen is None and several and (no_ib := switched_on(processes, "NCCL_IB_DISABLE")):
        chosen = Fact("Socket", no_ib.line)  # without InfiniBand only a plugin could be something else
    if chosen is None and not between_hosts and (no_device := first_of(processes, "no_ib")):
        has_sockets = any(process.interfaces for process in processes) and not first_of(processes, "ofi")
        chosen = Fact("Socket", no_device) if has_sockets else None
    is_tcp = chosen is not None and _is_tcp(chosen.value, processes)
    if not between_hosts and not (is_tcp and several is not False and not communicator.connections):
        return
    network = between_hosts[0].method if between_hosts or chosen is None else chosen.value
    names = sorted({name for process in processes for name in process.interfaces})
    interfaces = f", {', '.join(names[:4])}" if names else ""
    if between_hosts:
        what = f"{pairs_text(between_hosts)} talk over TCP ({between_hosts[0].path}{interfaces})"
    else:
        when = "hosts talk" if several else "if there are several hosts, they talk"
        what = f"{when} over TCP (network {network}{interfaces})"
    provider = first_of(processes, "ofi_tcp") if network not in _TCP else None
    why = reason("ofi_tcp", provider) if provider else _socket_reason(processes)
    why = reason("fast_socket") if network == "FastSocket" else why
    why = why._replace(advice=f"{why.advice}; on TCP alone, compress: bf16, int8 and PowerSGD pay most here")
    severity: Severity = "slow" if between_hosts or several else "note"
    yield finding(severity, "socket_network", between_hosts[0] if between_hosts else chosen, what=what, why=why)


def _socket_reason(ends: list[Process]) -> Reason:
    """Returns why ranks do not use RDMA."""
    forced, chosen = setting(ends, "NCCL_NET"), setting(ends, "NCCL_IB_HCA")
    nics = {name: line for process in ends for name, line in process.nics.items()}
    no_ib, no_ofi = switched_on(ends, "NCCL_IB_DISABLE"), first_of(ends, "no_ofi")
    if no_ofi and not nics:
        also = f", and the environment sets NCCL_IB_DISABLE={no_ib.value}" if no_ib else ""
        return reason("no_ofi", no_ofi, no_ib, also=also)
    if no_ib:
        return reason("ib_disabled", no_ib, value=no_ib.value)
    if forced and forced.value.lower() == "socket":
        return reason("socket_chosen", forced)
    broken = (("plugin_broken", "plugin_broken"), ("no_ibverbs", "no_ibverbs"), ("no_open", "nic_not_opened"))
    for note, code in broken:
        if line := first_of(ends, note):
            return reason(code, line)
    if no_device := first_of(ends, "no_ib"):
        none = f"NCCL_IB_HCA={chosen.value} may match none" if chosen else "there is none"
        plugin = " and no network plugin (libnccl-net.so)" if first_of(ends, "no_plugin") else ""
        return reason("no_ib_device", no_device, chosen, none=none, plugin=plugin)
    if nics:
        return reason("nics_not_used", next(iter(nics.values())), forced, names=", ".join(sorted(nics)[:4]))
    return reason("no_faster_network")


def _find_virtual_interface(communicator: Communicator) -> Iterator[Finding]:
    is_known = communicator.spans_hosts
    if is_known is False:
        return
    for process in communicator.processes:
        usable = [name for name, fact in process.interfaces.items() if not _is_unreachable(name, fact.value)]
        is_tcp = process.network is None or process.network.value in _TCP
        interface = "" if process.bootstrap is None else process.bootstrap.value.partition(":")[0]
        for name in dict.fromkeys((interface, *(process.interfaces if is_tcp else ()))):
            fact = process.interfaces.get(name)
            address = fact.value if fact else process.address
            # If there may be just one host, only the loopback interface beside others is worth a word.
            is_shown = is_known or (name == "lo" and usable)
            if name and is_shown and _is_unreachable(name, address):
                named = process.settings.get("NCCL_SOCKET_IFNAME")
                cause = f"the environment sets NCCL_SOCKET_IFNAME={named.value}" if named else "NCCL took what is up"
                is_certain = is_known and not _PRIVATE.match(name)
                severity: Severity = ("warning" if usable or not is_certain else "error") if is_known else "note"
                yield finding(
                    severity,
                    "virtual_interface",
                    *(named, process.bootstrap, fact),
                    host=process.host or "a process",
                    interface=f"{name} ({address})",
                    cause=cause,
                    kind=_kind(name, address),
                    confidence=None if is_certain else "possible",
                    names=",".join(usable) or "the interface that the hosts share, as eth0 or ib0 (ip -br addr)",
                )
                return


def _kind(name: str, address: str) -> str:
    if name == "lo":
        return "others cannot reach it: each host has its own loopback"
    if _PRIVATE.match(name):
        return "only members of this VPN or Wi-Fi reach it, and slowly"
    kind = "link-local address" if address.startswith(_LINK_LOCAL) else "virtual interface"
    return f"others can hardly reach it ({kind})"


def _is_unreachable(name: str, address: str) -> bool:
    is_odd = _VIRTUAL.match(name) or _PRIVATE.match(name)
    return name == "lo" or is_odd is not None or address.startswith(_LINK_LOCAL)


def _find_no_gdr(communicator: Communicator) -> Iterator[Finding]:
    networks = [connection for connection in communicator.connections if connection.kind == "NET"]
    rdma = [connection for connection in networks if not _is_tcp(connection.method, communicator.processes)]
    without = [connection for connection in rdma if not connection.has_gdr]
    ends = ends_of(communicator, without) if without else communicator.processes
    disabled = [name for process in ends for name, line in process.gdr.items() if "isabled" in line.text]
    if without:
        share = f"{len(without)} of {len(rdma)} connections" if len(without) < len(rdma) else "all connections"
        what = f"{share} over NET/{without[0].method} work without GPUDirect RDMA: {pairs_text(without)}"
    elif disabled and not rdma and communicator.spans_hosts is not False:
        what = f"NCCL disabled GPUDirect RDMA for {list_some(dict.fromkeys(disabled))}"
    else:
        return
    if gb10 := _gb10_line(communicator):
        yield finding("note", "no_gdr", *without[:1], what=what, why=reason("gdr_gb10", gb10))
        return
    severity: Severity = "slow" if without or communicator.spans_hosts else "note"
    yield finding(severity, "no_gdr", *without[:1], what=what, why=_gdr_reason(rdma, without, ends))


def _gb10_line(communicator: Communicator) -> Line | None:
    """Returns a line that shows that all known GPUs are of the kind GB10; None if one is not, or none is known."""
    known = [member for member in communicator.all_members if member.bus_id]
    is_gb10 = bool(known) and all(member.bus_id.lower() == _GB10_BUS for member in known)
    return next(filter(None, (line for m in known for line in (m.started, m.finished))), None) if is_gb10 else None


def _is_far_allowed(level: Fact | None) -> bool:
    """Returns whether a value of ``NCCL_NET_GDR_LEVEL`` allows GPUDirect RDMA at any distance, or through the CPU."""
    return level is not None and level.value.upper() in ("PHB", "SYS", "3", "4", "5")


def _gdr_reason(rdma: list[Connection], without: list[Connection], ends: list[Process]) -> Reason:
    """Returns why NICs do not read and write GPUs' memory, on some connections or on all."""
    level = setting(ends, "NCCL_NET_GDR_LEVEL") or setting(ends, "NCCL_IB_GDR_LEVEL")
    no_read, disabled = switched_on(ends, "NCCL_NET_GDR_READ", on=False), first_of(ends, "gdr_disabled")
    sends_only = bool(without) and all(connection.direction == "send" for connection in without)
    method = without[0].method if without else "IB"
    if sends_only and no_read:
        return reason("gdr_read_off", no_read)
    if sends_only and len(without) < len(rdma):
        return reason("gdr_sends_staged")
    if level and level.value.upper() in ("LOC", "0", "-1"):
        return reason("gdr_level", level, value=level.value)
    nics = {name: line for process in ends for name, line in process.nics.items()}
    if omni_path := next((line for name, line in nics.items() if name.startswith("hfi")), None):
        return reason("gdr_omni_path", omni_path)
    if disabled and "distance" in disabled.text:
        return reason("gdr_distance_allowed" if _is_far_allowed(level) else "gdr_distance", disabled, level)
    can_gdr, what = first_of(ends, "gdr_enabled"), "NCCL has found it for the NIC"
    if can_gdr is None:
        can_gdr, what = first_of(ends, "dmabuf"), "DMA-BUF is available"
    if can_gdr and not disabled and not _is_far_allowed(level):
        limit = f"NCCL_NET_GDR_LEVEL={level.value}" if level else "NCCL"
        return reason("gdr_dmabuf", can_gdr, level, what=what, limit=limit)
    if not method.startswith(_VERBS) or (disabled and "HCA" not in disabled.text):
        return reason("gdr_plugin", disabled, unknown="" if disabled else "unknown: perhaps ", method=method)
    lines = [*(line for end in ends for line in end.notes.values()), *(end.version.line for end in ends if end.version)]
    if any("rccl" in line.text.lower() for line in lines):
        why = "the kernel offers RCCL no GPUDirect RDMA" if disabled else "unknown: the log does not say why"
        return reason("gdr_rccl", disabled, reason=why)
    if disabled:
        is_missing = "no module" in disabled.text
        unregistered = "" if is_missing else "; or it is loaded but not registered with the NIC's driver"
        return reason("gdr_kernel", disabled, unregistered=unregistered)
    return reason("gdr_unknown", level)


FINDERS = (_find_sockets, _find_virtual_interface, _find_no_gdr)
"""Functions that find which paths between hosts are slower than they could be, and why if the log shows it."""
