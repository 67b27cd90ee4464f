"""Reads messages of NCCL 2.4 to 2.30: about a process (version, network, environment), and about one of its ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from commopt_diagnose.nccl_log.facts import Connection, Fact, Member, Process, SearchResult
from commopt_diagnose.nccl_log.lines import Message
from lightning_commopt.text.findings import read_texts

_TABLE = read_texts(Path(__file__).with_name("patterns.txt"))
_PROCESS, _RANK = ({name: re.compile(text) for name, text in _TABLE[of].items()} for of in ("process", "rank"))
_PROCESS_NOTES, _RANK_NOTES = (
    re.compile("|".join(f"(?P<{name}>{text})" for name, text in _TABLE[of].items()))
    for of in ("process_notes", "rank_notes")
)
# The stage of initialization that a note of this name proves. All other notes prove stage 1: the communicator is new.
_STAGES = {"rings": 4, "trees": 5, "nvls": 5, "collnet": 5}
_METHODS = ("CUMEM", "direct pointer", "IPC", "MNNVL")  # methods of P2P
_INTERFACES = ("NET/Socket : Using", "NET/FastSocket : Using")
_MAX_RING = 20  # NCCL prints at most this many ranks of a ring

MAX_RANKS = 1 << 20
"""The number of a rank is smaller; a larger one is damage to the line."""

_MAX_CHANNELS = 1 << 10  # numbers of channels are smaller; a larger one is damage to the line, too


def find_version(text: str) -> str | None:
    """Returns the version of NCCL or RCCL that a line names."""
    match = _PROCESS["version"].search(text)
    return match and (f"{match[2]} (RCCL)" if match[1] in "Rr" else match[2])


def is_passed_on(text: str) -> bool:
    """Returns whether a message only says where NCCL passes an error on, such as ``init.cc:910 -> 2``."""
    return _PROCESS["failed_at"].match(text) is not None


def is_retried(text: str) -> bool:
    """Returns whether a message says that a connection failed, and that NCCL will try it again."""
    return text.startswith("socket") and _PROCESS["retried"].match(text) is not None


def read_process_line(process: Process, message: Message) -> bool:
    """Adds what a message reports of a process; returns whether it does."""
    text = message.text
    if not _PROCESS["beginning"].match(text):
        return False
    if _PROCESS["gdr_off"].match(text):
        process.notes.setdefault("gdr_disabled", message.line)
    elif match := _PROCESS["set_by_plugin"].match(text):
        process.set_by_plugin.add(match[1])
    if (match := _PROCESS_NOTES.match(text)) and match.lastgroup:
        process.notes.setdefault(match.lastgroup, message.line)
        return True
    if not text.startswith("NET/Socket") and (match := _PROCESS["gdr"].search(text)):
        state = "gdr_enabled" if match[1].lower().startswith("enable") else "gdr_disabled"
        process.notes.setdefault(state, message.line)
        process.gdr[match[2] or match[3]] = message.line
        return True
    if match := _PROCESS["failed_at"].match(text):
        if not _PROCESS["aborted"].match(text):
            process.failed_at, process.failed_tid = process.failed_at or Fact(match[1], message.line), message.tid
        return True
    is_known = message.is_whole and _read_value(process, message)
    if is_known and process.failed_tid == message.tid:
        process.failed_at = None  # NCCL has continued with something else, so this was no failure
    return is_known


def _read_value(process: Process, message: Message) -> bool:
    """Adds a value; the message must be whole, as a value that is cut off would be another value."""
    text, line = message.text, message.line
    if text.startswith("NCCL_") and (match := _PROCESS["setting"].match(text)):
        process.settings.setdefault(match[1], Fact(match[2], line))
    elif (match := _PROCESS["bootstrap"].match(text)) or text.startswith(_INTERFACES):
        if match:
            process.bootstrap = process.bootstrap or Fact(f"{match[1]}:{match[2]}", line)
            process.interfaces.setdefault(match[1], Fact(match[2], line))
        for name, address in _PROCESS["interface"].findall(text):
            process.interfaces.setdefault(name, Fact(address, line))
    elif text.startswith(("NET/IB : Using", "NET/IB: Using", "NET/IB: [", "NET/gIB : Using")):
        for name, port in _PROCESS["nic"].findall(text):
            process.nics.setdefault(name + port, line)
    elif match := _PROCESS["network"].match(text):
        process.network = Fact(match[1], line)
    elif _PROCESS["version"].match(text) and (version := find_version(text)):
        process.version = Fact(version, line)
    elif match := _PROCESS["driver"].match(text):
        process.driver = Fact(match[1], line)
    else:
        return False
    return True


def read_rank_line(process: Process, message: Message) -> None:
    """Adds what a message reports of a rank to a member of its process; of an unknown message only its place."""
    text = message.text
    if " opCount " in text:
        _read_call(process, message)
        return
    member = None
    if " comm 0x" in f" {text}" and " rank " in text and (match := _RANK["identity"].search(text)):
        member = _read_identity(process, message, match)
    elif " -> " in text and " via " in text:
        member = _read_connection(process, message) if message.is_whole else None
    elif match := _RANK_NOTES.match(text):
        stage = _STAGES.get(match.lastgroup or "", 1)
        member = process.member(message, begins=stage == 1)
        member.notes.setdefault(match.lastgroup or "", message.line)
        member.reach(stage)
    if member is None and message.is_whole:
        member = _read_graphs(process, message) or _read_topology(process, message)
    member = member or process.find_member(message)
    if member is not None:
        member.last = message


def _read_call(process: Process, message: Message) -> None:
    """Reads the number of ranks from a call of a collective, if no line before has named the communicator."""
    if not process.by_address and (match := _RANK["call"].search(message.text)) and _are_ranks([int(match[2])]):
        member = process.member(message)
        member.address = member.address or match[1]
        member.num_ranks = member.num_ranks or int(match[2])
        process.by_address[match[1]] = member


def _read_identity(process: Process, message: Message, match: re.Match[str]) -> Member | None:
    """Reads a line that names the communicator: its beginning, its end, or its nodes."""
    address, rank, num_ranks, rest = match[1], int(match[2]), int(match[3]), match[4]
    if not _are_ranks([rank, num_ranks]) or rank >= num_ranks:
        return None
    part = _RANK["comm_id"].search(rest)
    comm_id = None if part is None else part[1]
    member = process.named_member(message, address, rank, num_ranks, comm_id)
    member.comm_id = member.comm_id or comm_id
    if part := _RANK["split"].search(rest):
        member.parent, member.split = part[1], f"{part[2]}:{part[3]}"
    if part := _RANK["bus_id"].search(rest):
        member.bus_id, member.nvml_device = part[2], None if part[1] is None else int(part[1])
    if part := _RANK["nodes"].search(rest):
        member.num_nodes = int(part[1])
        member.reach(1)
    if "COMPLETE" in rest and "Destroy" not in rest and "Abort" not in rest and "Revoke" not in rest:
        member.finished, member.is_repeated = member.finished or message.line, False
    elif "Destroy" in rest or "Abort" in rest:
        member.ended = member.ended or message.line
        if "COMPLETE" in rest:
            process.by_address.pop(address, None)
    elif "Init START" in rest:
        member.is_repeated = member.started is not None
        member.started = member.started or message.line
    return member


class _Link(NamedTuple):
    """What a line says of a connection, without the communicator, and what identifies it there."""

    key: tuple[int, int, int, str, str]
    fields: tuple[Any, ...]  # the fields of `Connection`, up to its line
    own: int  # the rank that wrote the line
    kind: str
    communicator_words: tuple[str, ...]  # the address of the communicator and what follows, where the line has them


@lru_cache(maxsize=1 << 16)  # large logs repeat the lines of connections
def _parse_link(text: str) -> _Link | None:
    """Parses a line such as ``Channel 02/0 : 7[7] -> 8[0] [send] via NET/IB/0(3)/GDRDMA``."""
    match = _RANK["connection"].match(text)
    if match is None:
        return None
    channel, sender, receiver, via = int(match[1]), int(match[2]), int(match[4]), match[7].strip()
    kind, _, method = ("SHM", "", "") if via.startswith("direct shared memory") else via.partition("/")
    net = _RANK["net"].match(via)
    is_cut = kind == "P2P" and method != "" and any(known.startswith(method) and known != method for known in _METHODS)
    is_known = not is_cut and (kind in ("P2P", "SHM") or net is not None)
    if not (is_known and _are_ranks([sender, receiver]) and channel < _MAX_CHANNELS):
        return None
    direction, method = match[6] or "", sys.intern(method if net is None else net[1])
    nic, proxy = (None, None) if net is None else (int(net[2]), None if net[3] is None else int(net[3]))
    has_gdr = net is not None and "/GDRDMA" in net[4]
    labels = sys.intern(match[3] or ""), sys.intern(match[5] or "")
    path = "/".join(filter(None, (kind, method, "GDRDMA" if has_gdr else "")))
    _, separator, address = text.partition(" comm 0x")
    return _Link(
        key=(channel, sender, receiver, direction, path),
        fields=(channel, sender, receiver, direction, kind, method, nic, proxy, has_gdr, labels),
        own=receiver if direction == "receive" else sender,
        kind=kind,
        communicator_words=tuple(address.split()[:3]) if separator else (),
    )


def _read_connection(process: Process, message: Message) -> Member | None:
    link = _parse_link(message.text)
    if link is None:
        return None
    own, words = link.own, link.communicator_words
    member = process.by_address.get(f"0x{words[0]}") if words else None
    member = member if member is not None and member.rank == own else process.member(message, rank=own)
    if member.num_ranks is None and words[1:2] == ("nRanks",) and words[-1].isdecimal() and int(words[-1]) > own:
        member.num_ranks = int(words[-1])  # RCCL
    if link.key not in member.connections:
        shared = process.connections.get(link.fields)
        if shared is None:
            shared = process.connections[link.fields] = Connection._make((*link.fields, message.line))
            process.uses_p2p |= link.kind == "P2P"
        member.connections[link.key] = shared
        member.connected = member.connected or message.number
        member.reach(3, *link.key[1:3])
    return member


def _read_graphs(process: Process, message: Message) -> Member | None:
    """Reads rings, trees, numbers of channels, what NCCL searched for, and how long that took."""
    text = message.text
    if match := _RANK["ring_order"].match(text):
        return _read_ring(process, message, match)
    if match := _RANK["ring_place"].match(text):
        places = list(map(int, match.groups()))
        return _at_place(process, message, places[1], places) if _are_ranks(places) else None
    if text.startswith("Trees"):
        rank, ranks = None, set[int]()
        for shown, own in _RANK["trees"].findall(text):
            shown_ranks = {int(number) for number in re.findall(r"(?<![\d-])\d+", shown.replace("->", " "))}
            if int(own) >= 0 and _are_ranks(shown_ranks):
                rank, ranks = int(own), ranks | shown_ranks
        member = None if rank is None else _at_place(process, message, rank, ranks)
        if member is not None:
            member.has_trees = True
        return member
    if channels := _RANK["channels"].findall(text):
        member = process.member(message)
        member.channels.update({kind: int(number) for number, kind in channels if int(number) < _MAX_CHANNELS})
        return member
    if match := _RANK["search"].match(text):
        member = process.member(message, begins=True)
        speeds = float(match[3]), float(match[4])
        member.searches.append(SearchResult(int(match[1]), int(match[2]), match[5], match[6], *speeds, message.line))
        member.reach(1)
        return member
    return None


def _at_place(process: Process, message: Message, rank: int, ranks: Iterable[int]) -> Member:
    """Returns the rank whose place in a graph a line shows, among other ranks."""
    member = process.member(message, begins=True, rank=rank)
    member.reach(2, *ranks)
    return member


def _read_ring(process: Process, message: Message, match: re.Match[str]) -> Member | None:
    """Reads the order of all ranks, which rank 0 prints; of many ranks NCCL prints only the first."""
    channel, ring = int(match[1]), tuple(map(int, match[3].split()))
    if not (channel < _MAX_CHANNELS and _are_ranks(ring)) or len(set(ring)) < len(ring) or ring[0] != 0:
        return None
    member = process.member(message, begins=True, rank=0)
    is_all = len(ring) < _MAX_RING and not match[4] and max(ring) == len(ring) - 1
    # A single line may be cut, even if it has a line end. So a second channel has to agree.
    if is_all and member.num_ranks is None and (match[2] == "1" or len(ring) in map(len, member.rings.values())):
        member.num_ranks = len(ring)
    if member.num_ranks is not None and len(ring) != min(member.num_ranks, _MAX_RING) and not match[4]:
        return None
    member.rings[channel] = ring
    member.channels.setdefault("coll", int(match[2]))
    member.reach(1, *ring)
    return member


def _read_topology(process: Process, message: Message) -> Member | None:
    """Reads NVLinks of the topology, which ``NCCL_DEBUG_SUBSYS=GRAPH`` prints below their GPUs."""
    gpu, nvlink = _RANK["gpu_line"].match(message.text), _RANK["nvlink_line"].match(message.text)
    if gpu is None and nvlink is None:
        return None
    member = process.member(message)
    if gpu is not None:
        member.listed_gpu = gpu[1]
    elif nvlink is not None and member.listed_gpu:
        member.nvlinks.setdefault((member.listed_gpu, nvlink[1]), message.line)
    return member


def _are_ranks(numbers: Iterable[int]) -> bool:
    return all(0 <= number < MAX_RANKS for number in numbers)
