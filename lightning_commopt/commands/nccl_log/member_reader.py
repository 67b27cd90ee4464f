"""Reads messages about a rank of a communicator: who it is, its channels, connections and collectives."""

from __future__ import annotations

import re

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.facts import Fact, Member
from lightning_commopt.commands.nccl_log.sources import Message, Source

_NOTES = {
    "p2p_disabled": ("P2P is disabled between",),
    "nvls_available": ("NVLS multicast support is available",),
    "nvls_unavailable": ("NVLS multicast support is not available",),
    "rings": ("Connected all rings",),
    "trees": ("Connected all trees",),
    "nvls": ("Connected NVLS tree", "NVLS comm 0x"),
    "collnet": ("Connected collnet", "Connected Collnet Chains"),
}


def read_member_line(source: Source, message: Message) -> None:
    """Adds what a message says of a rank; an unknown one is only its last line.

    Args:
        source: the process that wrote it; its members are changed.
        message: a line of ``NCCL INFO``.
    """
    text = message.text
    if found := grammar.IDENTITY.search(text):
        member = _read_identity(source, message, found)
    elif " -> " in text and " via " in text:
        member = _read_connection(source, message)
    elif found := grammar.COLLECTIVE.match(text):
        member = _read_call(source, message, found)
    else:
        member = _read_notes(source, message) or (_read_graphs(source, message) if message.is_whole else None)
    member = member or source.find_member(message)
    if member is not None:
        member.last = message.line


def _read_identity(source: Source, message: Message, found: re.Match[str]) -> Member | None:
    """Reads a line that names the communicator: its beginning, its end, or its nodes."""
    address, rank, num_ranks, rest = found[1], int(found[2]), int(found[3]), found[4]
    if not grammar.are_ranks(rank, num_ranks) or rank >= num_ranks:
        return None
    line = message.line
    part = grammar.COMM_ID.search(rest)
    comm_id = None if part is None else part[1]
    member = source.named_member(message, address, rank, num_ranks, comm_id)
    member.comm_id = member.comm_id or comm_id
    if part := grammar.SPLIT.search(rest):
        member.parent, member.split = part[1], f"{part[2]}:{part[3]}"
    if part := grammar.BUS_ID.search(rest):
        member.bus_id = part[1]
    if part := grammar.NODES.search(rest):
        member.num_nodes, member.num_local_ranks = int(part[1]), int(part[2])
    if "Init START" in rest:
        member.started = member.started or line
    elif "Init COMPLETE" in rest:
        member.finished = member.finished or line
    elif "Destroy" in rest or "Abort" in rest:
        member.ended = member.ended or line
        if "COMPLETE" in rest:
            source.by_address.pop(address, None)
    return member


def _read_connection(source: Source, message: Message) -> Member | None:
    connection = grammar.parse_connection(message.text, message.line) if message.is_whole else None
    if connection is None:
        return None
    ends = (connection.sender, connection.receiver)
    member = source.member(message, ends=ends)
    if member.rank is None:
        member.rank = connection.receiver if connection.direction == "receive" else connection.sender
    key = (connection.channel, *ends, connection.direction, connection.path)
    member.connections.setdefault(key, connection)
    return member


def _read_call(source: Source, message: Message, found: re.Match[str]) -> Member | None:
    operation, counter, count, dtype, reduction, root, address = found.groups()
    member = source.by_address.get(address) or source.find_member(message)
    # Sends and receives differ between ranks by right.
    if member is None or operation in ("Send", "Recv") or len(counter) > 16:
        return None
    shown = f"{operation} of {count} elements (datatype {dtype}, op {reduction}, root {root})"
    member.calls.setdefault(int(counter, 16), []).append(Fact(shown, message.line))
    return member


def _read_notes(source: Source, message: Message) -> Member | None:
    text = message.text
    name = next((name for name, beginnings in _NOTES.items() if text.startswith(beginnings)), None)
    if name is None and "Connected CollNet" not in text:
        return None
    member = source.member(message)
    member.notes.setdefault(name or "collnet", message.line)
    return member


def _read_graphs(source: Source, message: Message) -> Member | None:
    """Reads rings, trees, numbers of channels, what NCCL searched for, and how long that took."""
    text, line = message.text, message.line
    if text.startswith("Trees"):
        rank, trees = grammar.parse_trees(text)
        if rank is None:
            return None
        member = source.member(message, ends=(rank,))
        member.rank = rank if member.rank is None else member.rank
        member.trees.update(trees)
        return member
    if found := grammar.RING_ORDER.match(text):
        channel, ring = int(found[1]), tuple(map(int, found[3].split()))
        if not (grammar.is_channel(channel) and grammar.are_ranks(*ring)):
            return None
        member = source.member(message)
        member.rings[channel] = ring
    elif found_channels := grammar.CHANNELS.findall(text):
        member = source.member(message)
        member.channels.update({kind: int(number) for number, kind in found_channels if int(number) < 1 << 10})
    elif search := grammar.parse_search(text, line):
        member = source.member(message)
        member.searches.append(search)
    elif init_s := grammar.parse_init_s(text):
        member = source.member(message)
        member.init_s, member.init_line = init_s, line
    else:
        return None
    return member
