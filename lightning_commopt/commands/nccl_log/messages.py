"""Reads messages of NCCL 2.4 to 2.30: about a process (version, network, environment), and about one of its ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from lightning_commopt.commands.nccl_log.facts import Connection, Fact, Member, Process, SearchResult
from lightning_commopt.commands.nccl_log.lines import Message
from lightning_commopt.commands.nccl_log.sources import Source

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
_SETTING = re.compile(r"(NCCL_[A-Z0-9_]+) set (?:by environment )?to (.*?)\.?$")
_BOOTSTRAP = re.compile(r"(?:Bootstrap|NET) ?: Using (?:interface )?(?:\[\d+\])?([^\s:]+):(\S+?)(?:<\d+>|$)")
_INTERFACE = re.compile(r"\[\d+\]([^\s:\[\]]+):([^\s<]+)<\d+>")
_NIC = re.compile(r"([\w.+-]+:\d+/(?:IB/SHARP|IB|RoCE))")
_NETWORK = re.compile(r"Using (?:network|(?:in|ex)ternal Network) (?:Network )?(.+)$")
_VERSION = re.compile(r"([NR])CCL version ?:? *(\d+\.\d+(?:\.\d+)?(?:\+cuda\d+(?:\.\d+)?)?)", re.IGNORECASE)
_DRIVER = re.compile(r"cudaDriverVersion (\d+)")
_GDR = re.compile(
    r"GPU Direct RDMA (?:\(.*?\) )?(enabled?|disabled) for (?:HCA \d+ '(.+?)'|(GPU \S+ / HCA \d+.*))", re.IGNORECASE
)
_FAILED_AT = re.compile(r"([\w/]+\.(?:cc|h|cu):\d+ -> \d)\b")
_ABORTED = re.compile(r"\S*socket\.cc:\d+ -> 3\b")  # sockets fail so once the communicator is being aborted

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
_IDENTITY = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank (\d+) n[rR]anks (\d+)\b(.*)$")
_COMM_ID = re.compile(r"commId (0x[0-9a-fA-F]+) ")  # whole: something stands behind it
_SPLIT = re.compile(r"parent (0x[0-9a-fA-F]+) (?:splitCount|childCount) (\d+) color (-?\d+)")
_BUS_ID = re.compile(r"(?:nvmlDev (\d+) )?busId ([0-9a-fA-F]+)")
_NODES = re.compile(r"nNodes (\d+) localRanks (\d+)")
_CONNECTION = re.compile(
    r"(?:Channel|Ring) (\d+)(?:/\d+)? : (\d+)(?:\[([0-9a-fA-F]+)\])? -> (\d+)(?:\[([0-9a-fA-F]+)\])?"
    r"(?: \[(send|receive)\])? via (.+?)(?: comm (0x[0-9a-fA-F]+).*)?$"
)
_NET = re.compile(r"NET/(.+?)/(\d+)(?:\((\d+)\))?((?:/GDRDMA(?:\(\w+\))?|/Shared)*)$")
_METHODS = ("CUMEM", "direct pointer", "IPC", "MNNVL")  # of P2P
_RING_ORDER = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)( ?\.\.\.)?$")
_RING_PLACE = re.compile(r"Ring \d+ : (\d+) -> (\d+) -> (\d+)$")
_TREES = re.compile(r"\[\d+\] (-?\d+(?:/-?\d+)*->(-?\d+)->-?\d+(?:/-?\d+)*)")
_CHANNELS = re.compile(r"\b(\d{1,6}) (coll|collnet|nvls|p2p) channels(?! per)")
_SEARCH = re.compile(
    r"Pattern (\d+), crossNic -?\d+, nChannels (\d+), (?:bw|speed) (\d+\.?\d*)/(\d+\.?\d*), type (\w+)/(\w+)"
)
_GPU_LINE = re.compile(r"GPU/(?:\d+-)?([0-9A-Fa-f]+) \(")
_NVLINK_LINE = re.compile(r"\+ NVL\[[\d.]+\] - GPU/(?:\d+-)?([0-9A-Fa-f]+)")
_MAX_RING = 20  # ranks that NCCL prints of a ring
_MAX_RANKS = 1 << 20  # a larger number is damage to the line; likewise
_MAX_CHANNELS = 1 << 10


def find_version(text: str) -> str | None:
    """Returns the version of NCCL or RCCL that a line names."""
    found = _VERSION.search(text)
    return found and (f"{found[2]} (RCCL)" if found[1] in "Rr" else found[2])


def read_process_line(process: Process, message: Message) -> bool:
    """Adds what a message reports of a process; returns whether it does."""
    text = message.text
    if not _PROCESS_BEGINNINGS.match(text):
        return False
    for name, beginnings in _PROCESS_NOTES.items():
        if text.startswith(beginnings):
            process.notes.setdefault(name, message.line)
            return True
    if not text.startswith("NET/Socket") and (found := _GDR.search(text)):
        state = "gdr_enabled" if found[1].lower().startswith("enable") else "gdr_disabled"
        process.notes.setdefault(state, message.line)
        process.gdr[found[2] or found[3]] = message.line
        return True
    if found := _FAILED_AT.match(text):
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
    if text.startswith("NCCL_") and (found := _SETTING.match(text)):
        process.settings.setdefault(found[1], Fact(found[2], line))
    elif (found := _BOOTSTRAP.match(text)) or text.startswith("NET/Socket : Using"):
        if found:
            process.bootstrap = process.bootstrap or Fact(f"{found[1]}:{found[2]}", line)
            process.interfaces.setdefault(found[1], Fact(found[2], line))
        for name, address in _INTERFACE.findall(text):
            process.interfaces.setdefault(name, Fact(address, line))
    elif text.startswith(("NET/IB : Using", "NET/IB: Using", "NET/IB: [")):
        for name in _NIC.findall(text):
            process.nics.setdefault(name, line)
    elif found := _NETWORK.match(text):
        process.network = Fact(found[1], line)
    elif _VERSION.match(text) and (version := find_version(text)):
        process.version = Fact(version, line)
    elif found := _DRIVER.match(text):
        process.driver = Fact(found[1], line)
    else:
        return False
    return True


def read_rank_line(source: Source, message: Message) -> None:
    """Adds what a message reports of a rank to the members of its source; an unknown one is only the last line."""
    text = message.text
    if " opCount " in text:
        return  # a call of a collective
    first = text.partition(" ")[0]
    member = None
    if " comm 0x" in f" {text}" and " rank " in text and (found := _IDENTITY.search(text)):
        member = _read_identity(source, message, found)
    elif " -> " in text and " via " in text:
        member = _read_connection(source, message) if message.is_whole else None
    elif first in _FIRST_WORDS or "CollNet" in text:
        member = _read_note(source, message)
    if member is None and message.is_whole:
        member = _read_graphs(source, message) or _read_topology(source, message)
    member = member or source.find_member(message)
    if member is not None:
        member.last = message


def _read_identity(source: Source, message: Message, found: re.Match[str]) -> Member | None:
    """Reads a line that names the communicator: its beginning, its end, or its nodes."""
    address, rank, num_ranks, rest = found[1], int(found[2]), int(found[3]), found[4]
    if not _are_ranks([rank, num_ranks]) or rank >= num_ranks:
        return None
    part = _COMM_ID.search(rest)
    comm_id = None if part is None else part[1]
    member = source.named_member(message, address, rank, num_ranks, comm_id)
    member.comm_id = member.comm_id or comm_id
    if part := _SPLIT.search(rest):
        member.parent, member.split = part[1], f"{part[2]}:{part[3]}"
    if part := _BUS_ID.search(rest):
        member.bus_id, member.nvml_device = part[2], None if part[1] is None else int(part[1])
    if part := _NODES.search(rest):
        member.num_nodes = int(part[1])
        member.reach(1)
    if "COMPLETE" in rest and "Destroy" not in rest and "Abort" not in rest and "Revoke" not in rest:
        member.finished = member.finished or message.line
    elif "Destroy" in rest or "Abort" in rest:
        member.ended = member.ended or message.line
        if "COMPLETE" in rest:
            source.by_address.pop(address, None)
    elif "Init START" in rest:
        member.started = member.started or message.line
    return member


def _parse_connection(message: Message) -> Connection | None:
    """Parses a line such as ``Channel 02/0 : 7[7] -> 8[0] [send] via NET/IB/0(3)/GDRDMA``."""
    found = _CONNECTION.match(message.text)
    if found is None:
        return None
    channel, sender, receiver, via = int(found[1]), int(found[2]), int(found[4]), found[7].strip()
    kind, _, method = ("SHM", "", "") if via.startswith("direct shared memory") else via.partition("/")
    net = _NET.match(via)
    is_cut = kind == "P2P" and method != "" and any(each.startswith(method) and each != method for each in _METHODS)
    is_known = not is_cut and (kind in ("P2P", "SHM") or net is not None)
    if not (is_known and _are_ranks([sender, receiver]) and channel < _MAX_CHANNELS):
        return None
    return Connection(
        channel=channel,
        sender=sender,
        receiver=receiver,
        direction=found[6] or "",
        kind=kind,
        method=sys.intern(method if net is None else net[1]),
        nic=None if net is None else int(net[2]),
        proxy_rank=None if net is None or net[3] is None else int(net[3]),
        has_gdr=net is not None and "/GDRDMA" in net[4],
        labels=(sys.intern(found[3] or ""), sys.intern(found[5] or "")),
        line=message.line,
    )


def _read_connection(source: Source, message: Message) -> Member | None:
    connection = _parse_connection(message)
    if connection is None:
        return None
    own = connection.receiver if connection.direction == "receive" else connection.sender
    _, named, address = message.text.partition(" comm 0x")
    words = address.split() if named else []
    member = source.by_address.get(f"0x{words[0]}") if words else None
    member = member if member is not None and member.rank == own else source.member(message, rank=own)
    if member.num_ranks is None and words[1:2] == ["nRanks"] and words[-1].isdecimal() and int(words[-1]) > own:
        member.num_ranks = int(words[-1])  # RCCL
    key = (connection.channel, *connection.pair, connection.direction, connection.path)
    member.connections.setdefault(key, connection)
    member.reach(3, *connection.pair)
    source.process.uses_p2p |= connection.kind == "P2P"
    return member


def _read_note(source: Source, message: Message) -> Member | None:
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
    if found := _RING_ORDER.match(text):
        return _read_ring(source, message, found)
    if found := _RING_PLACE.match(text):
        places = list(map(int, found.groups()))
        return _at_place(source, message, places[1], places) if _are_ranks(places) else None
    if text.startswith("Trees"):
        rank, ranks = None, set[int]()
        for shown, own in _TREES.findall(text):
            named = {int(number) for number in re.findall(r"(?<![\d-])\d+", shown.replace("->", " "))}
            if int(own) >= 0 and _are_ranks(named):
                rank, ranks = int(own), ranks | named
        member = None if rank is None else _at_place(source, message, rank, ranks)
        if member is not None:
            member.has_trees = True
        return member
    if channels := _CHANNELS.findall(text):
        member = source.member(message)
        member.channels.update({kind: int(number) for number, kind in channels if int(number) < _MAX_CHANNELS})
        return member
    if found := _SEARCH.match(text):
        member = source.member(message, begins=True)
        speeds = float(found[3]), float(found[4])
        member.searches.append(SearchResult(int(found[1]), int(found[2]), found[5], found[6], *speeds, message.line))
        member.reach(1)
        return member
    return None


def _at_place(source: Source, message: Message, rank: int, ranks: Iterable[int]) -> Member:
    """Returns the rank whose place in a graph a line shows, among other ranks."""
    member = source.member(message, begins=True, rank=rank)
    member.reach(2, *ranks)
    return member


def _read_ring(source: Source, message: Message, found: re.Match[str]) -> Member | None:
    """Reads the order of all ranks, which rank 0 prints; of many ranks NCCL prints only the first."""
    channel, ring = int(found[1]), tuple(map(int, found[3].split()))
    if not (channel < _MAX_CHANNELS and _are_ranks(ring)) or len(set(ring)) < len(ring) or ring[0] != 0:
        return None
    member = source.member(message, begins=True, rank=0)
    is_all = len(ring) < _MAX_RING and not found[4] and max(ring) == len(ring) - 1
    # A second channel has to agree: a single line may be cut, also in front of a line end.
    if is_all and member.num_ranks is None and (found[2] == "1" or len(ring) in map(len, member.rings.values())):
        member.num_ranks = len(ring)
    if member.num_ranks is not None and len(ring) != min(member.num_ranks, _MAX_RING) and not found[4]:
        return None
    member.rings[channel] = ring
    member.channels.setdefault("coll", int(found[2]))
    member.reach(1, *ring)
    return member


def _read_topology(source: Source, message: Message) -> Member | None:
    """Reads NVLinks of the topology, which ``NCCL_DEBUG_SUBSYS=GRAPH`` prints, each below its GPU."""
    gpu, nvlink = _GPU_LINE.match(message.text), _NVLINK_LINE.match(message.text)
    if gpu is None and nvlink is None:
        return None
    member = source.member(message)
    if gpu is not None:
        member.listed_gpu = gpu[1]
    elif nvlink is not None and member.listed_gpu:
        member.nvlinks.setdefault((member.listed_gpu, nvlink[1]), message.line)
    return member


def _are_ranks(numbers: Iterable[int]) -> bool:
    return all(0 <= number < _MAX_RANKS for number in numbers)
