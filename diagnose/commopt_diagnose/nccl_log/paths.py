"""Findings about the ways in which ranks communicate: which are slow, and because of which setting or hardware.

They are about paths within a host, and between hosts: TCP instead of RDMA, no GPUDirect, unreachable interfaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from commopt_diagnose.findings import FindingTexts, Reason
from commopt_diagnose.nccl_log.communicators import Communicator
from commopt_diagnose.nccl_log.facts import Connection, Fact, Process
from lightning_commopt.text.findings import Finding, Line, Severity
from lightning_commopt.text.formatting import list_some

_TEXTS = FindingTexts(Path(__file__).with_name("findings.txt"))
finding, reason = _TEXTS.finding, _TEXTS.reason
_FAR = ("PHB", "NODE", "SYS")
_RING_PATTERN = 4  # NCCL's number for rings in its search for a topology
_VIRTUAL = re.compile(
    r"docker|virbr|br-|veth|cni|flannel|cali|tun|tap|wl|wg|tailscale|zt|cloudflare|vmnet|lxc|kube|nodelocal",
    re.IGNORECASE,
)
_LINK_LOCAL = ("fe80", "169.254.")
_OFF = ("0", "no", "false", "")  # values with which a switch is off


def is_in_host(communicator: Communicator, connection: Connection) -> bool | None:
    """Returns whether both ends are on one host; None if unknown."""
    if connection.kind != "NET":
        return True
    if connection.is_between_hosts:
        return False
    num_nodes = communicator.num_nodes
    if num_nodes == 1:
        return True
    sender, receiver = (communicator.members.get(rank) for rank in connection.pair)
    if sender is None or receiver is None or not sender.process.host or not receiver.process.host:
        return None
    first, second = sender.process.machine, receiver.process.machine
    if first.host != second.host or (first.address and second.address):
        return first == second
    return None if num_nodes is not None and num_nodes == communicator.num_ranks else True


def _pairs_text(connections: Sequence[Connection]) -> str:
    """Returns the pairs of ranks that connections join, whichever of them sends."""
    pairs = sorted({(min(connection.pair), max(connection.pair)) for connection in connections})
    shown = [f"{first} and {second}" for first, second in pairs]
    return f"ranks {shown[0]}" if len(shown) == 1 else f"{len(shown)} pairs of ranks ({list_some(shown)})"


def _setting(processes: Sequence[Process], name: str) -> Fact | None:
    return next((process.settings[name] for process in processes if name in process.settings), None)


def _switched_on(processes: Sequence[Process], name: str, *, on: bool = True) -> Fact | None:
    """Returns a switch such as ``NCCL_P2P_DISABLE`` from a process that sets it on, or with ``on=False`` off."""
    facts = (process.settings[name] for process in processes if name in process.settings)
    return next((fact for fact in facts if (fact.value.lower() not in _OFF) == on), None)


def _first_of(processes: Sequence[Process], note: str) -> Line | None:
    return next((process.notes[note] for process in processes if note in process.notes), None)


def _ends_of(communicator: Communicator, connections: Sequence[Connection]) -> list[Process]:
    """Returns the processes of the ranks that some connections join; all processes if ranks are unknown."""
    if not communicator.members:
        return communicator.processes
    ranks = {rank for connection in connections for rank in connection.pair}
    return [member.process for rank, member in communicator.members.items() if rank in ranks]


def _find_network_in_host(communicator: Communicator) -> Iterator[Finding]:
    networks = [connection for connection in communicator.connections if connection.kind == "NET"]
    detours = [connection for connection in networks if is_in_host(communicator, connection) is True]
    if not detours:
        return
    ends = _ends_of(communicator, detours)
    why = _network_reason(communicator, ends)
    is_shared = len(networks) < len(communicator.connections)
    is_by_design = why is None and (is_shared or any(connection.has_gdr for connection in detours))
    if is_by_design:
        why = reason("nic_is_faster")
        unknown = f"unknown: {why.why}; or settings that the log lacks forbid other paths"
        why = why if is_shared else why._replace(why=unknown)
    elif why is None:
        level = _setting(ends, "NCCL_P2P_LEVEL")
        excludes = f", and NCCL_P2P_LEVEL={level.value} excludes P2P" if level else ""
        why = reason("no_shared_memory", level, level=excludes)
    hosts = sorted({process.host for process in ends if process.host})
    where = f"on one host ({hosts[0]})" if len(hosts) == 1 else f"each on one host ({list_some(hosts) or 'unnamed'})"
    what = f"{_pairs_text(detours)} are {where} but talk over {detours[0].path}"
    yield finding("note" if is_by_design else "slow", "network_in_host", detours[0], what=what, why=why)


def _network_reason(communicator: Communicator, ends: list[Process]) -> Reason | None:
    """Returns the setting that forbids other paths, or why NCCL takes ranks of one host for ranks of several."""
    no_p2p, no_shm = _switched_on(ends, "NCCL_P2P_DISABLE"), _switched_on(ends, "NCCL_SHM_DISABLE")
    if no_shm is not None:
        names = "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE" if no_p2p else "NCCL_SHM_DISABLE"
        no_path = "" if no_p2p else ", and these GPUs have no direct path (P2P)"
        return reason("shm_disabled", no_p2p, no_shm, names=names, no_path=no_path)
    num_nodes, num_hosts = communicator.num_nodes or 0, len(communicator.machines)
    if num_nodes <= num_hosts or communicator.missing:
        return None
    host_id = _setting(ends, "NCCL_HOSTID")
    cause = f"NCCL_HOSTID={host_id.value}" if host_id else "containers that share the host's name"
    return reason("split_host", host_id, num_nodes=num_nodes, num_hosts=num_hosts, cause=cause)


def _find_shared_memory(communicator: Communicator) -> Iterator[Finding]:
    copies = [connection for connection in communicator.connections if connection.kind == "SHM"]
    why = _shared_memory_reason(communicator, copies)
    if copies:
        what = f"{_pairs_text(copies)} copy through host memory ({copies[0].path}) instead of P2P"
    elif why.evidence and why.evidence[0] and not communicator.connections and communicator.num_ranks != 1:
        what = "GPUs of a host talk without P2P: through host memory (SHM), or the network"
    else:
        return
    advice = "nvidia-smi topo -m shows the links; where they stay slow, send fewer bytes: comm_hook=bf16"
    why = why._replace(advice=f"{why.advice}; {advice}")
    yield finding("slow" if copies else "note", "shared_memory", *copies[:1], what=what, why=why)


def _shared_memory_reason(communicator: Communicator, copies: list[Connection]) -> Reason:
    ends = _ends_of(communicator, copies)
    no_p2p, level = _switched_on(ends, "NCCL_P2P_DISABLE"), _setting(ends, "NCCL_P2P_LEVEL")
    first = copies[0].line if copies else None
    is_late = no_p2p and first and first.file == no_p2p.line.file and first.number < no_p2p.line.number
    if no_p2p and not is_late and not any(end.uses_p2p for end in ends):
        return reason("p2p_disabled_by_user", no_p2p, value=no_p2p.value)
    if level and level.value.upper() in ("LOC", "0"):
        return reason("p2p_level_never", level, value=level.value)
    for note in ("p2p_refused", "p2p_disabled"):
        if refused := _first_of(ends, note):
            return reason(note, refused)
    limit = f"NCCL_P2P_LEVEL={level.value} in the environment" if level else "NCCL's limit for P2P"
    is_mixed = any(connection.kind == "P2P" for connection in communicator.connections)
    others = "; other pairs of this host use P2P, and a ring is as slow as its slowest link" if is_mixed else ""
    return reason("no_p2p", level if copies else None, limit=limit, others=others)


def _find_indirect(communicator: Communicator) -> Iterator[Finding]:
    p2p = [connection for connection in communicator.connections if connection.kind == "P2P"]
    indirect = [connection for connection in p2p if connection.method.startswith("indirect")]
    if indirect:
        yield finding("slow", "indirect_p2p", indirect[0], pairs=_pairs_text(indirect), path=indirect[0].path)


def _find_far_links(communicator: Communicator) -> Iterator[Finding]:
    searches = [search for member in communicator.all_members for search in member.searches if search.num_channels]
    rings = [search for search in searches if search.pattern == _RING_PATTERN] or searches
    if far := next((search for search in rings if search.intra in _FAR), None):
        yield finding("slow", "far_link", far, far=far)
    far = next((search for search in rings if search.inter in _FAR), None)
    if far and (communicator.spans_hosts or (far.intra == "LOC" and communicator.num_ranks != 1)):
        yield finding("slow", "far_nic", far, far=far)


def _find_one_way(communicator: Communicator) -> Iterator[Finding]:
    """Finds NVLinks that NCCL's topology has in only one direction."""
    links = {pair: line for member in communicator.all_members for pair, line in member.nvlinks.items()}
    listed = {first for first, _ in links}
    one_way = [pair for pair in links if pair[::-1] not in links and pair[1] in listed]
    if one_way:
        shown = list_some([f"{first} > {second}" for first, second in one_way])
        yield finding("slow", "one_way_nvlink", *[links[pair] for pair in one_way[:2]], shown=shown)


def _find_sockets(communicator: Communicator) -> Iterator[Finding]:
    sockets = [connection for connection in communicator.connections if connection.method == "Socket"]
    between_hosts = [connection for connection in sockets if is_in_host(communicator, connection) is not True]
    processes = _ends_of(communicator, between_hosts) if between_hosts else communicator.processes
    networks = [process.network for process in processes if process.network is not None]
    chosen = next((network for network in networks if network.value != "Socket"), networks[0] if networks else None)
    several = communicator.spans_hosts
    if chosen is None and several and (no_ib := _switched_on(processes, "NCCL_IB_DISABLE")):
        chosen = Fact("Socket", no_ib.line)  # without InfiniBand only a plugin could be something else
    is_tcp = chosen is not None and chosen.value == "Socket"
    if not between_hosts and not (is_tcp and several is not False and not communicator.connections):
        return
    names = sorted({name for process in processes for name in process.interfaces})
    interfaces = f", {', '.join(names[:4])}" if names else ""
    if between_hosts:
        what = f"{_pairs_text(between_hosts)} talk over TCP ({between_hosts[0].path}{interfaces})"
    else:
        when = "hosts talk" if several else "if there are several hosts, they talk"
        what = f"{when} over TCP (network Socket{interfaces})"
    why = _socket_reason(processes)
    why = why._replace(advice=f"{why.advice}; on TCP alone, compress: bf16, int8 and PowerSGD pay most here")
    severity: Severity = "slow" if between_hosts or several else "note"
    yield finding(severity, "socket_network", between_hosts[0] if between_hosts else chosen, what=what, why=why)


def _socket_reason(ends: list[Process]) -> Reason:
    """Returns why ranks do not use RDMA."""
    forced, chosen = _setting(ends, "NCCL_NET"), _setting(ends, "NCCL_IB_HCA")
    nics = {name: line for process in ends for name, line in process.nics.items()}
    if no_ib := _switched_on(ends, "NCCL_IB_DISABLE"):
        return reason("ib_disabled", no_ib, value=no_ib.value)
    if forced and forced.value.lower() == "socket":
        return reason("socket_chosen", forced)
    for note, code in (("no_ibverbs", "no_ibverbs"), ("no_open", "nic_not_opened")):
        if line := _first_of(ends, note):
            return reason(code, line)
    if no_device := _first_of(ends, "no_ib"):
        none = f"NCCL_IB_HCA={chosen.value} may match none" if chosen else "there is none"
        return reason("no_ib_device", no_device, chosen, none=none)
    if nics:
        return reason("nics_not_used", next(iter(nics.values())), forced, names=", ".join(sorted(nics)[:4]))
    return reason("no_faster_network")


def _find_virtual_interface(communicator: Communicator) -> Iterator[Finding]:
    if not communicator.spans_hosts:
        return
    for process in communicator.processes:
        usable = [name for name, fact in process.interfaces.items() if not _is_unreachable(name, fact.value)]
        is_tcp = process.network is None or process.network.value == "Socket"
        interface = "" if process.bootstrap is None else process.bootstrap.value.partition(":")[0]
        for name in dict.fromkeys((interface, *(process.interfaces if is_tcp else ()))):
            fact = process.interfaces.get(name)
            address = fact.value if fact else process.address
            if name and _is_unreachable(name, address):
                named = process.settings.get("NCCL_SOCKET_IFNAME")
                cause = f"the environment sets NCCL_SOCKET_IFNAME={named.value}" if named else "NCCL took what is up"
                yield finding(
                    "warning" if usable else "error",
                    "virtual_interface",
                    *(named, process.bootstrap, fact),
                    host=process.host or "a process",
                    interface=f"{name} ({address})",
                    cause=cause,
                    kind="link-local address" if address.startswith(_LINK_LOCAL) else "virtual interface",
                    names=",".join(usable) or "the interface that the hosts share, as eth0 or ib0 (ip -br addr)",
                )
                return


def _is_unreachable(name: str, address: str) -> bool:
    return name == "lo" or _VIRTUAL.match(name) is not None or address.startswith(_LINK_LOCAL)


def _find_no_gdr(communicator: Communicator) -> Iterator[Finding]:
    networks = [connection for connection in communicator.connections if connection.kind == "NET"]
    rdma = [connection for connection in networks if connection.method != "Socket"]
    without = [connection for connection in rdma if not connection.has_gdr]
    ends = _ends_of(communicator, without) if without else communicator.processes
    disabled = [name for process in ends for name, line in process.gdr.items() if "isabled" in line.text]
    if without:
        share = f"{len(without)} of {len(rdma)} connections" if len(without) < len(rdma) else "all connections"
        what = f"{share} over NET/{without[0].method} work without GPUDirect RDMA: {_pairs_text(without)}"
    elif disabled and not rdma and communicator.spans_hosts is not False:
        what = f"NCCL disabled GPUDirect RDMA for {list_some(dict.fromkeys(disabled))}"
    else:
        return
    severity: Severity = "slow" if without or communicator.spans_hosts else "note"
    yield finding(severity, "no_gdr", *without[:1], what=what, why=_gdr_reason(rdma, without, ends))


def _gdr_reason(rdma: list[Connection], without: list[Connection], ends: list[Process]) -> Reason:
    """Returns why NICs do not read and write GPUs' memory, on some connections or on all."""
    level = _setting(ends, "NCCL_NET_GDR_LEVEL") or _setting(ends, "NCCL_IB_GDR_LEVEL")
    no_read, disabled = _switched_on(ends, "NCCL_NET_GDR_READ", on=False), _first_of(ends, "gdr_disabled")
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
        return reason("gdr_distance", disabled)
    if not method.startswith("IB") or (disabled and "HCA" not in disabled.text):
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


SLOW_PATHS = (
    *(_find_network_in_host, _find_shared_memory, _find_indirect, _find_far_links, _find_one_way),
    *(_find_sockets, _find_virtual_interface, _find_no_gdr),
)
"""Functions that find what is slower than it could be, in a host or between hosts, and why if the log shows it."""
