"""Findings about networks between hosts: TCP instead of RDMA, no GPUDirect, CollNet and NICs that are not used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_commopt.commands.nccl_log.facts import Communicator, Connection, Fact, Process
from lightning_commopt.commands.nccl_log.finding import (
    Reason,
    finding,
    first_of,
    pairs_of,
    pairs_text,
    processes_of,
    reason,
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
    why = _socket_reason(processes)
    names = sorted({name for process in processes for name in process.interfaces})
    interfaces = f", {', '.join(names[:4])}" if names else ""
    if found:
        what = f"{pairs_text(pairs_of(found))} talk over TCP ({found[0].path}{interfaces})"
    else:
        when = "hosts talk" if several else "if there are several hosts, they talk"
        what = f"{when} over TCP (network Socket{interfaces})"
    why = why._replace(advice=f"{why.advice}; on TCP alone, compress: bf16, int8 and PowerSGD pay most here")
    severity: Severity = "slow" if found or several else "note"
    yield finding(severity, "socket_network", what, why, *found[:1], None if found else chosen)


def _socket_reason(ends: list[Process]) -> Reason:
    """Returns why ranks do not use RDMA."""
    no_ib, forced = switched_on(ends, "NCCL_IB_DISABLE"), setting(ends, "NCCL_NET")
    chosen, no_device = setting(ends, "NCCL_IB_HCA"), first_of(ends, "no_ib")
    no_library, no_open = first_of(ends, "no_ibverbs"), first_of(ends, "no_open")
    nics = {name: line for process in ends for name, line in process.nics.items()}
    if no_ib:
        return reason("ib_disabled", no_ib, value=no_ib.value)
    if forced and forced.value.lower() == "socket":
        return reason("socket_chosen", forced)
    if no_library:
        return reason("no_ibverbs", no_library)
    if no_open:
        return reason("nic_not_opened", no_open)
    if no_device:
        none = f"NCCL_IB_HCA={chosen.value} may match none" if chosen else "there is none"
        return reason("no_ib_device", no_device, chosen, none=none)
    if nics:
        return reason("nics_not_used", next(iter(nics.values())), forced, names=", ".join(sorted(nics)[:4]))
    return reason("no_faster_network")


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
            cause = f"the environment sets NCCL_SOCKET_IFNAME={chosen.value}" if chosen else "NCCL took what is up"
            kind = "link-local address" if address.startswith(_LINK_LOCAL) else "virtual interface"
            names = ",".join(usable) or "the interface that the hosts share, as eth0 or ib0 (ip -br addr)"
            what = f"{process.host or 'a process'} offers peers on other hosts the interface {name} ({address})"
            severity: Severity = "warning" if usable else "error"
            why = reason("virtual_interface", chosen=cause, kind=kind, names=names)
            yield finding(severity, "virtual_interface", what, why, chosen, process.bootstrap, fact)
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
    why = _gdr_reason(rdma, without, ends)
    if without:
        share = f"{len(without)} of {len(rdma)} connections" if len(without) < len(rdma) else "all connections"
        what = f"{share} over NET/{without[0].method} work without GPUDirect RDMA: {pairs_text(pairs_of(without))}"
    else:
        what = f"NCCL disabled GPUDirect RDMA for {list_some(list(disabled))}"
    severity: Severity = "slow" if without or spans_hosts(communicator) else "note"
    yield finding(severity, "no_gdr", what, why, *without[:1])


def _gdr_reason(rdma: list[Connection], without: list[Connection], ends: list[Process]) -> Reason:
    """Returns why NICs do not read and write GPUs' memory, on some connections or on all."""
    level = setting(ends, "NCCL_NET_GDR_LEVEL") or setting(ends, "NCCL_IB_GDR_LEVEL")
    no_read, disabled = switched_on(ends, "NCCL_NET_GDR_READ", on=False), first_of(ends, "gdr_disabled")
    sends_only = bool(without) and all(each.direction == "send" for each in without)
    is_partial = len(without) < len(rdma)
    nics = {name: line for process in ends for name, line in process.nics.items()}
    method = without[0].method if without else "IB"
    if sends_only and no_read:
        return reason("gdr_read_off", no_read)
    if sends_only and is_partial:
        return reason("gdr_sends_staged")
    if level and level.value.upper() in ("LOC", "0", "-1"):
        return reason("gdr_level", level, value=level.value)
    if omni_path := next((line for name, line in nics.items() if name.startswith("hfi")), None):
        return reason("gdr_omni_path", omni_path)
    if disabled and "distance" in disabled.text:
        return reason("gdr_distance", disabled)
    if not method.startswith("IB") or (disabled and "HCA" not in disabled.text):
        return reason("gdr_plugin", disabled, unknown="" if disabled else "unknown: perhaps ", method=method)
    said = [*(line for end in ends for line in end.notes.values()), *(end.version.line for end in ends if end.version)]
    if any("rccl" in line.text.lower() for line in said):
        why = "the kernel offers RCCL no GPUDirect RDMA" if disabled else "unknown: the log does not say why"
        return reason("gdr_rccl", disabled, reason=why)
    if disabled:
        is_missing = "no module" in disabled.text
        unregistered = "" if is_missing else "; or it is loaded but not registered with the NIC's driver"
        return reason("gdr_kernel", disabled, unregistered=unregistered)
    return reason("gdr_unknown", level)


SLOW_NETWORKS = (_find_sockets, _find_virtual_interface, _find_no_gdr)
"""Each finds something that keeps the traffic between hosts slow."""
