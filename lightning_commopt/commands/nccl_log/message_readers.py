"""Reads messages about a process (version, network, environment) and about a rank (channels, connections, calls)."""

from __future__ import annotations

import re

from lightning_commopt.commands.nccl_log import grammar
from lightning_commopt.commands.nccl_log.facts import Fact, Member, Process
from lightning_commopt.commands.nccl_log.lines import Message
from lightning_commopt.commands.nccl_log.sources import Source

_NOTES = (
    # beginning of the line, our name, the stage that it proves, whether only a new communicator has it
    ("NVLS multicast support is available", "nvls_available", 1, True),
    ("NVLS multicast support is not available", "nvls_unavailable", 1, True),
    ("Setting affinity for GPU", "affinity", 1, True),
    ("Connected all rings", "rings", 4, False),
    ("Connected all trees", "trees", 5, False),
    ("Connected NVLS tree", "nvls", 5, False),
    ("NVLS comm 0x", "nvls", 5, False),
    ("Connected collnet", "collnet", 5, False),
    ("Connected Collnet Chains", "collnet", 5, False),
)
_FIRST_WORDS = {beginning.split()[0] for beginning, *_ in _NOTES}
_GPU_LINE = re.compile(r"GPU/(?:\d+-)?([0-9A-Fa-f]+) \(")
_NVLINK_LINE = re.compile(r"\+ NVL\[[\d.]+\] - GPU/(?:\d+-)?([0-9A-Fa-f]+)")
_PROCESS_NOTES = {
    "no_ib": ("NET/IB : No device found", "NET/IB: No device found"),
    "no_ibverbs": ("Failed to open libibverbs.so", "NET/IB : Failed to open libibverbs"),
    "no_plugin": ("NET/Plugin : No plugin found", "NET/Plugin: Could not find", "NET/Plugin : Plugin load"),
    "no_open": ("NET/IB : Unable to open device",),
    "ofi": ("NET/OFI ",),
    "p2p_disabled": ("P2P is disabled between",),
    "p2p_refused": ("Could not enable P2P between", "P2P not supported between"),
}
_PROCESS_BEGINNINGS = re.compile(
    r"NCCL_|Bootstrap|NET|Using (?:network|internal N|external N)|[NR]CCL v|cudaD|DMA-BUF|GPU Direct|Failed to open lib"
    r"|P2P|Could not enable P2P|[\w/]+\.(?:cc|cu|h):"
)

_ABORTED = re.compile(r"\S*socket\.cc:\d+ -> 3\b")  # sockets fail so once the communicator is being aborted


class MemberReader:
    """Reads lines of ``NCCL INFO`` that are about one rank."""

    def __init__(self) -> None:
        self._gpu: dict[int, str] = {}  # whose links NCCL's topology lists just now, by id of the member

    def read(self, source: Source, message: Message) -> None:
        """Adds what a message says of a rank to the members of its source; an unknown one is only the last line."""
        text = message.text
        if " opCount " in text:
            return  # a call of a collective
        first = text.partition(" ")[0]
        member = None
        if " comm 0x" in f" {text}" and " rank " in text and (found := grammar.IDENTITY.search(text)):
            member = _read_identity(source, message, found)
        elif " -> " in text and " via " in text:
            member = _read_connection(source, message)
        elif first in _FIRST_WORDS or "CollNet" in text:
            member = _read_notes(source, message)
        if member is None and message.is_whole:
            member = _read_graphs(source, message) or self._read_topology(source, message)
        member = member or source.find_member(message)
        if member is not None:
            member.last = message

    def _read_topology(self, source: Source, message: Message) -> Member | None:
        """Reads NVLinks of the topology, which ``NCCL_DEBUG_SUBSYS=GRAPH`` prints."""
        text = message.text
        if found := _GPU_LINE.match(text):
            member = source.member(message)
            self._gpu[id(member)] = found[1]
            return member
        if found := _NVLINK_LINE.match(text):
            member = source.member(message)
            if id(member) in self._gpu:
                member.nvlinks.setdefault((self._gpu[id(member)], found[1]), message.line)
            return member
        return None


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
        member.bus_id, member.nvml_device = part[2], None if part[1] is None else int(part[1])
    if part := grammar.NODES.search(rest):
        member.num_nodes = int(part[1])
        member.reach(1)
    if "COMPLETE" in rest and "Destroy" not in rest and "Abort" not in rest and "Revoke" not in rest:
        member.finished = member.finished or line
    elif "Destroy" in rest or "Abort" in rest:
        member.ended = member.ended or line
        if "COMPLETE" in rest:
            source.by_address.pop(address, None)
    elif "Init START" in rest:
        member.started = member.started or line
    return member


def _read_connection(source: Source, message: Message) -> Member | None:
    connection = grammar.parse_connection(message.text, message.line) if message.is_whole else None
    if connection is None:
        return None
    own = connection.receiver if connection.direction == "receive" else connection.sender
    _, named, address = message.text.partition(" comm 0x")
    words = address.split() if named else []
    member = source.by_address.get(f"0x{words[0]}") if words else None
    member = member if member is not None and member.rank == own else source.member(message, rank=own)
    if member.num_ranks is None and words[1:2] == ["nRanks"] and words[-1].isdecimal() and int(words[-1]) > own:
        member.num_ranks = int(words[-1])  # RCCL
    ends = (connection.sender, connection.receiver)
    key = (connection.channel, *ends, connection.direction, connection.path)
    member.connections.setdefault(key, connection)
    member.reach(3, *ends)
    source.process.uses_p2p |= connection.kind == "P2P"
    return member


def _read_notes(source: Source, message: Message) -> Member | None:
    text = message.text
    known = next((each for each in _NOTES if text.startswith(each[0])), None)
    if known is None and "Connected CollNet" not in text:
        return None
    _, name, stage, begins = known or ("", "collnet", 5, False)
    member = source.member(message, begins=begins)
    member.notes.setdefault(name, message.line)
    member.reach(stage)
    return member


def _read_graphs(source: Source, message: Message) -> Member | None:
    """Reads rings, trees, numbers of channels, what NCCL searched for, and how long that took."""
    text = message.text
    if text.startswith("Trees"):
        trees = grammar.parse_trees(text)
        if trees is None:
            return None
        member = source.member(message, begins=True, rank=trees[0])
        member.has_trees = True
        member.reach(2, *trees[1])
        return member
    if found := grammar.RING_ORDER.match(text):
        return _read_ring(source, message, found)
    if found := grammar.RING_PLACE.match(text):
        places = [int(each) for each in found.groups()[1:]]
        if not grammar.are_ranks(*places):
            return None
        member = source.member(message, begins=True, rank=places[1])
        member.reach(2, *places)
        return member
    if found_channels := grammar.CHANNELS.findall(text):
        member = source.member(message)
        member.channels.update({kind: int(number) for number, kind in found_channels if int(number) < 1 << 10})
    elif search := grammar.parse_search(text, message.line):
        member = source.member(message, begins=True)
        member.searches.append(search)
        member.reach(1)
    else:
        return None
    return member


def _read_ring(source: Source, message: Message, found: re.Match[str]) -> Member | None:
    """Reads the order of all ranks, which rank 0 prints; of many ranks NCCL prints only the first."""
    channel, ring = int(found[1]), tuple(map(int, found[3].split()))
    if not (grammar.is_channel(channel) and grammar.are_ranks(*ring)) or len(set(ring)) < len(ring) or ring[0] != 0:
        return None
    member = source.member(message, begins=True, rank=0)
    is_all = len(ring) < grammar.MAX_RING and not found[4] and max(ring) == len(ring) - 1
    # A second channel has to agree: a single line may be cut, also in front of a line end.
    if is_all and member.num_ranks is None and (found[2] == "1" or len(ring) in map(len, member.rings.values())):
        member.num_ranks = len(ring)
    if member.num_ranks is not None and len(ring) != min(member.num_ranks, grammar.MAX_RING) and not found[4]:
        return None
    member.rings[channel] = ring
    member.channels.setdefault("coll", int(found[2]))
    member.reach(1, *ring)
    return member


def read_process_line(process: Process, message: Message) -> bool:
    """Adds what a message says of a process; returns whether it does."""
    text = message.text
    if not _PROCESS_BEGINNINGS.match(text):
        return False
    for name, beginnings in _PROCESS_NOTES.items():
        if text.startswith(beginnings):
            process.notes.setdefault(name, message.line)
            return True
    if not text.startswith("NET/Socket") and (found := grammar.GDR.search(text)):
        state = "gdr_enabled" if found[1].lower().startswith("enable") else "gdr_disabled"
        process.notes.setdefault(state, message.line)
        process.gdr[found[2] or found[3]] = message.line
        return True
    if found := grammar.FAILED_AT.match(text):
        if not _ABORTED.match(text):
            process.failed_at, process.failed_tid = process.failed_at or Fact(found[1], message.line), message.tid
        return True
    if "disabling GDR" in text:
        process.notes.setdefault("gdr_disabled", message.line)
        return True
    is_known = message.is_whole and _read_value(process, message)
    if is_known and process.failed_tid == message.tid:
        process.failed_at = None  # NCCL went on, with something else
    return is_known


def _read_value(process: Process, message: Message) -> bool:
    """Adds a value; one that is cut off would be another value."""
    text, line = message.text, message.line
    if text.startswith("NCCL_") and (found := grammar.SETTING.match(text)):
        process.settings.setdefault(found[1], Fact(found[2], line))
    elif found := grammar.BOOTSTRAP.match(text):
        process.bootstrap = process.bootstrap or Fact(f"{found[1]}:{found[2]}", line)
        process.interfaces.setdefault(found[1], Fact(found[2], line))
        _read_interfaces(process, message)
    elif text.startswith("NET/Socket : Using"):
        _read_interfaces(process, message)
    elif text.startswith(("NET/IB : Using", "NET/IB: Using", "NET/IB: [")):
        for name in grammar.NIC.findall(text):
            process.nics.setdefault(name, line)
    elif found := grammar.NETWORK.match(text):
        process.network = Fact(found[1].removeprefix("Network "), line)
    elif found := grammar.VERSION.match(text):
        process.version = Fact(f"{found[1]} (RCCL)" if text.startswith("R") else found[1], line)
    elif found := grammar.DRIVER.match(text):
        process.driver = Fact(found[1], line)
    else:
        return False
    return True


def _read_interfaces(process: Process, message: Message) -> None:
    for name, address in grammar.INTERFACE.findall(message.text):
        process.interfaces.setdefault(name, Fact(address, message.line))
