"""Findings about the ways that ranks of a host talk: which are slow, and which setting or hardware is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning_commopt.commands.nccl_log.facts import Communicator, Connection, Process
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
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import list_some

_FAR = ("PHB", "NODE", "SYS")
_RING_PATTERN = 4


def select(communicator: Communicator, matches: Callable[[Connection], bool]) -> list[Connection]:
    """Returns some of the connections."""
    return [each for each in communicator.connections if matches(each)]


def ends_of(communicator: Communicator, found: list[Connection]) -> list[Process]:
    """Returns the processes of the ranks that some connections join; of communicators without an id, all."""
    if not communicator.members:
        return processes_of(communicator)
    return processes_of(communicator, {rank for pair in pairs_of(found) for rank in pair})


def is_in_host(communicator: Communicator, connection: Connection) -> bool | None:
    """Returns whether both ends are on one host; None where the log does not say."""
    if connection.kind != "NET":
        return True
    sender, receiver = connection.labels
    if sender == receiver and len(sender) > 2:
        return False  # a host has a bus id only once
    if communicator.num_nodes == 1:
        return True
    ends = [communicator.members.get(rank) for rank in (connection.sender, connection.receiver)]
    machines = [None if end is None else end.process.machine for end in ends]
    if machines[0] is None or machines[1] is None or not machines[0].host or not machines[1].host:
        return None
    if machines[0].host != machines[1].host or (machines[0].address and machines[1].address):
        return machines[0] == machines[1]
    num_nodes = communicator.num_nodes
    return None if num_nodes is not None and num_nodes == communicator.num_ranks else True


def _find_network_in_host(communicator: Communicator) -> Iterator[Finding]:
    found = select(communicator, lambda each: each.kind == "NET" and is_in_host(communicator, each) is True)
    if not found:
        return
    ends = ends_of(communicator, found)
    why = _forbidden_paths(ends) or _split_host(communicator, ends)
    is_shared = any(each.kind != "NET" for each in communicator.connections)
    is_by_design = why is None and (is_shared or any(each.has_gdr for each in found))
    hosts = sorted({process.host for process in ends if process.host})
    where = f"on one host ({hosts[0]})" if len(hosts) == 1 else f"each on one host ({list_some(hosts) or 'unnamed'})"
    why = why or (reason("nic_is_faster") if is_by_design else _no_shared_memory(ends))
    if is_by_design and not is_shared:
        why = why._replace(why=f"unknown: {why.why}; or settings that the log lacks forbid other paths")
    what = f"{pairs_text(pairs_of(found))} are {where} but talk over {found[0].path}"
    yield finding("note" if is_by_design else "slow", "network_in_host", what, why, found[0])


def _forbidden_paths(ends: list[Process]) -> Reason | None:
    no_p2p, no_shm = switched_on(ends, "NCCL_P2P_DISABLE"), switched_on(ends, "NCCL_SHM_DISABLE")
    if no_shm is None:
        return None
    names = "NCCL_P2P_DISABLE and NCCL_SHM_DISABLE" if no_p2p else "NCCL_SHM_DISABLE"
    no_path = "" if no_p2p else ", and these GPUs have no direct path (P2P)"
    return reason("shm_disabled", no_p2p, no_shm, names=names, no_path=no_path)


def _split_host(communicator: Communicator, ends: list[Process]) -> Reason | None:
    """Returns the reason, where NCCL takes ranks of one host for ranks of several."""
    num_hosts = len(communicator.machines)
    if communicator.num_nodes is None or communicator.num_nodes <= num_hosts or communicator.missing:
        return None
    host_id = setting(ends, "NCCL_HOSTID")
    cause = f"NCCL_HOSTID={host_id.value}" if host_id else "containers that share the host's name"
    return reason("split_host", host_id, num_nodes=communicator.num_nodes, num_hosts=num_hosts, cause=cause)


def _no_shared_memory(ends: list[Process]) -> Reason:
    level = setting(ends, "NCCL_P2P_LEVEL")
    excludes = f", and NCCL_P2P_LEVEL={level.value} excludes P2P" if level else ""
    return reason("no_shared_memory", level, level=excludes)


def _find_shared_memory(communicator: Communicator) -> Iterator[Finding]:
    found = select(communicator, lambda each: each.kind == "SHM")
    why = _shared_memory_reason(communicator, ends_of(communicator, found), found)
    if found:
        what = f"{pairs_text(pairs_of(found))} copy through host memory ({found[0].path}) instead of P2P"
    elif why.evidence and not communicator.connections and communicator.num_ranks != 1:
        what = "GPUs of a host talk without P2P: through host memory (SHM), or the network"
    else:
        return
    advice = "nvidia-smi topo -m shows the links; where they stay slow, send fewer bytes: comm_hook=bf16"
    advice = f"{why.advice}; {advice}"
    yield finding("slow" if found else "note", "shared_memory", what, why._replace(advice=advice), *found[:1])


def _shared_memory_reason(communicator: Communicator, ends: list[Process], found: list[Connection]) -> Reason:
    no_p2p, level = switched_on(ends, "NCCL_P2P_DISABLE"), setting(ends, "NCCL_P2P_LEVEL")
    first = found[0].line if found else None
    is_late = no_p2p and first and first.file == no_p2p.line.file and first.number < no_p2p.line.number
    if no_p2p and not is_late and not any(end.uses_p2p for end in ends):
        return reason("p2p_disabled_by_user", no_p2p, value=no_p2p.value)
    if level and level.value.upper() in ("LOC", "0"):
        return reason("p2p_level_never", level, value=level.value)
    for note in ("p2p_refused", "p2p_disabled"):
        if refused := first_of(ends, note):
            return reason(note, refused)
    limit = f"NCCL_P2P_LEVEL={level.value} in the environment" if level else "NCCL's limit for P2P"
    is_mixed = bool(select(communicator, lambda each: each.kind == "P2P"))
    others = "; other pairs of this host use P2P, and a ring is as slow as its slowest link" if is_mixed else ""
    return reason("no_p2p", level if found else None, limit=limit, others=others)


def _find_indirect(communicator: Communicator) -> Iterator[Finding]:
    found = select(communicator, lambda each: each.kind == "P2P" and each.method.startswith("indirect"))
    if found:
        what = f"{pairs_text(pairs_of(found))} talk through a third GPU ({found[0].path})"
        yield finding("slow", "indirect_p2p", what, reason("indirect_p2p"), found[0])


def _find_far_links(communicator: Communicator) -> Iterator[Finding]:
    searches = [search for member in communicator.all_members for search in member.searches if search.num_channels]
    rings = [search for search in searches if search.pattern == _RING_PATTERN] or searches
    far = next((search for search in rings if search.intra in _FAR), None)
    if far is not None:
        what = f"the ring in a host crosses a {far.intra} link, {far.intra_gb_per_s:g} GB/s a channel"
        yield finding("slow", "far_link", what, reason("far_link"), far)
    far = next((search for search in rings if search.inter in _FAR), None)
    if far is not None and (spans_hosts(communicator) or (far.intra == "LOC" and communicator.num_ranks != 1)):
        what = f"between hosts, GPUs reach their NICs by a {far.inter} link, {far.inter_gb_per_s:g} GB/s a channel"
        yield finding("slow", "far_nic", what, reason("far_nic"), far)


def _find_one_way(communicator: Communicator) -> Iterator[Finding]:
    """Finds NVLinks that NCCL's topology has in one direction only."""
    links = {pair: line for member in communicator.all_members for pair, line in member.nvlinks.items()}
    listed = {first for first, _ in links}
    one_way = [pair for pair in links if pair[::-1] not in links and pair[1] in listed]
    if one_way:
        what = f"NCCL sees NVLink in one direction only: {list_some([f'{a} > {b}' for a, b in one_way])} (bus ids)"
        yield finding("slow", "one_way_nvlink", what, reason("one_way_nvlink"), *[links[pair] for pair in one_way[:2]])


SLOW_PATHS = (_find_network_in_host, _find_shared_memory, _find_indirect, _find_far_links, _find_one_way)
"""Each finds connections in a host that are slower than they could be, and why, as far as the log tells."""
