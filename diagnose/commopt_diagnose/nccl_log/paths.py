"""Findings about the ways in which ranks of a host communicate: which are slow, by which setting or hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from commopt_diagnose.findings import FindingTexts, Reason
from commopt_diagnose.nccl_log.communicators import Communicator
from commopt_diagnose.nccl_log.facts import Connection, Fact, Process
from lightning_commopt.text.findings import Finding, Line
from lightning_commopt.text.formatting import list_some

_TEXTS = FindingTexts(Path(__file__).with_name("findings.txt"))
finding, reason = _TEXTS.finding, _TEXTS.reason
_FAR = ("PHB", "NODE", "SYS")
_RING_PATTERN = 4  # NCCL's number for rings in its search for a topology
_OFF = ("0", "no", "false", "")  # values with which a switch is off


def is_in_host(communicator: Communicator, connection: Connection) -> bool | None:
    """Returns whether both ends are on one host; None if unknown."""
    if connection.kind != "NET" and not connection.is_multi_node_nvlink:
        return True
    if connection.is_between_hosts:
        return False
    num_nodes = communicator.num_nodes
    if num_nodes == 1 and not connection.is_multi_node_nvlink:
        return True
    sender, receiver = (communicator.members.get(rank) for rank in connection.pair)
    if sender is None or receiver is None or not sender.process.host or not receiver.process.host:
        return None
    first, second = sender.process.machine, receiver.process.machine
    if first.host != second.host or (first.address and second.address):
        return first == second
    return None if num_nodes is not None and num_nodes == communicator.num_ranks else True


def pairs_text(connections: Sequence[Connection]) -> str:
    """Returns the pairs of ranks that connections join, whichever of them sends."""
    pairs = sorted({(min(connection.pair), max(connection.pair)) for connection in connections})
    shown = [f"{first} and {second}" for first, second in pairs]
    return f"ranks {shown[0]}" if len(shown) == 1 else f"{len(shown)} pairs of ranks ({list_some(shown)})"


def setting(processes: Sequence[Process], name: str) -> Fact | None:
    """Returns a setting from the first process that has it."""
    return next((process.settings[name] for process in processes if name in process.settings), None)


def switched_on(processes: Sequence[Process], name: str, *, on: bool = True) -> Fact | None:
    """Returns a switch such as ``NCCL_P2P_DISABLE`` from a process that sets it on, or with ``on=False`` off."""
    facts = (process.settings[name] for process in processes if name in process.settings)
    return next((fact for fact in facts if (fact.value.lower() not in _OFF) == on), None)


def first_of(processes: Sequence[Process], note: str) -> Line | None:
    """Returns the line of a note from the first process that has it."""
    return next((process.notes[note] for process in processes if note in process.notes), None)


def ends_of(communicator: Communicator, connections: Sequence[Connection]) -> list[Process]:
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
    ends = ends_of(communicator, detours)
    why = _network_reason(communicator, ends)
    is_shared = len(networks) < len(communicator.connections)
    is_by_design = why is None and (is_shared or any(connection.has_gdr for connection in detours))
    if is_by_design:
        why = reason("nic_is_faster")
        unknown = f"unknown: {why.why}; or settings that the log lacks forbid other paths"
        why = why if is_shared else why._replace(why=unknown)
    elif why is None:
        level = setting(ends, "NCCL_P2P_LEVEL")
        excludes = f", and NCCL_P2P_LEVEL={level.value} excludes P2P" if level else ""
        why = reason("no_shared_memory", level, level=excludes)
    hosts = sorted({process.host for process in ends if process.host})
    location = f"on one host ({hosts[0]})" if len(hosts) == 1 else f"each on one host ({list_some(hosts) or 'unnamed'})"
    what = f"{pairs_text(detours)} are {location} but talk over {detours[0].path}"
    yield finding("note" if is_by_design else "slow", "network_in_host", detours[0], what=what, why=why)


def _network_reason(communicator: Communicator, ends: list[Process]) -> Reason | None:
    """Returns the setting that forbids other paths, or why NCCL takes ranks of one host for ranks of several."""
    no_p2p, no_shm = switched_on(ends, "NCCL_P2P_DISABLE"), switched_on(ends, "NCCL_SHM_DISABLE")
    if no_shm is not None:
        names = "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE" if no_p2p else "NCCL_SHM_DISABLE"
        no_path = "" if no_p2p else ", and these GPUs have no direct path (P2P)"
        return reason("shm_disabled", no_p2p, no_shm, names=names, no_path=no_path)
    num_nodes, num_hosts = communicator.num_nodes or 0, len(communicator.machines)
    if num_nodes <= num_hosts or communicator.missing:
        return None
    host_id = setting(ends, "NCCL_HOSTID")
    cause = f"NCCL_HOSTID={host_id.value}" if host_id else "containers that share the host's name"
    return reason("split_host", host_id, num_nodes=num_nodes, num_hosts=num_hosts, cause=cause)


def _find_shared_memory(communicator: Communicator) -> Iterator[Finding]:
    copies = [connection for connection in communicator.connections if connection.kind == "SHM"]
    why = _shared_memory_reason(communicator, copies)
    if copies:
        what = f"{pairs_text(copies)} copy through host memory ({copies[0].path}) instead of P2P"
    elif why.evidence and why.evidence[0] and not communicator.connections and communicator.num_ranks != 1:
        what = "GPUs of a host talk without P2P: through host memory (SHM), or the network"
    else:
        return
    advice = "nvidia-smi topo -m shows the links; where they stay slow, send fewer bytes: comm_hook=bf16"
    why = why._replace(advice=f"{why.advice}; {advice}")
    yield finding("slow" if copies else "note", "shared_memory", *copies[:1], what=what, why=why)


def _shared_memory_reason(communicator: Communicator, copies: list[Connection]) -> Reason:
    ends = ends_of(communicator, copies)
    no_p2p, level = switched_on(ends, "NCCL_P2P_DISABLE"), setting(ends, "NCCL_P2P_LEVEL")
    first = copies[0].line if copies else None
    is_late = no_p2p and first and first.file == no_p2p.line.file and first.number < no_p2p.line.number
    if no_p2p and not is_late and not any(end.uses_p2p for end in ends):
        return reason("p2p_disabled_by_user", no_p2p, value=no_p2p.value)
    if level and level.value.upper() in ("LOC", "0"):
        return reason("p2p_level_never", level, value=level.value)
    for note in ("p2p_refused", "p2p_disabled"):
        if refused := first_of(ends, note):
            return reason(note, refused)
    if level and copies and level.value.upper() in ("SYS", "5"):
        return reason("no_p2p_anywhere", level)
    limit = f"NCCL_P2P_LEVEL={level.value} in the environment" if level else "NCCL's limit for P2P"
    is_mixed = any(connection.kind == "P2P" for connection in communicator.connections)
    others = "; other pairs of this host use P2P, and a ring is as slow as its slowest link" if is_mixed else ""
    return reason("no_p2p", level if copies else None, limit=limit, others=others)


def _find_indirect(communicator: Communicator) -> Iterator[Finding]:
    p2p = [connection for connection in communicator.connections if connection.kind == "P2P"]
    indirect = [connection for connection in p2p if connection.method.startswith("indirect")]
    if indirect:
        yield finding("slow", "indirect_p2p", indirect[0], pairs=pairs_text(indirect), path=indirect[0].path)


def _find_far_links(communicator: Communicator) -> Iterator[Finding]:
    searches = [search for member in communicator.all_members for search in member.searches if search.num_channels]
    rings = [search for search in searches if search.pattern == _RING_PATTERN] or searches
    if far := next((search for search in rings if search.intra in _FAR), None):
        yield finding("slow", "far_link", far, far=far)
    far = next((search for search in rings if search.inter in _FAR), None)
    networks = [connection for connection in communicator.connections if connection.kind == "NET"]
    if networks and all(connection.has_gdr for connection in networks):
        return  # a far NIC matters by the loss of GPUDirect RDMA
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


FINDERS = (*(_find_network_in_host, _find_shared_memory, _find_indirect, _find_far_links, _find_one_way),)
"""Functions that find which paths in a host are slower than they could be, and why if the log shows it."""
