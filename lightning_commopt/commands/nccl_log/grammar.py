"""Messages of NCCL 2.4 to 2.30 and of PyTorch's watchdog: patterns, and what their parts mean."""

from __future__ import annotations

import re
import sys

from lightning_commopt.commands.nccl_log.facts import Choice, Connection, Progress, SearchResult, Timeout
from lightning_commopt.text.findings import Line

SETTING = re.compile(r"(NCCL_[A-Z0-9_]+) set (?:by environment )?to (.*?)\.?$")
BOOTSTRAP = re.compile(r"(?:Bootstrap|NET) ?: Using (?:interface )?(?:\[\d+\])?([^\s:]+):(\S+?)(?:<\d+>|$)")
INTERFACE = re.compile(r"\[\d+\]([^\s:\[\]]+):([^\s<]+)<\d+>")
NIC = re.compile(r"([\w.+-]+:\d+/(?:IB/SHARP|IB|RoCE))")
NETWORK = re.compile(r"Using (?:network|(?:in|ex)ternal Network) (.+)$")
VERSION = re.compile(r"[NR]CCL version ?:? *(\d+\.\d+(?:\.\d+)?(?:\+cuda\d+(?:\.\d+)?)?)", re.IGNORECASE)
PACKAGE = re.compile(r"(?:nvidia-nccl-cu\d+|using nccl)[ =]+(\d+\.\d+\.\d+)")
DRIVER = re.compile(r"cudaDriverVersion (\d+)")
GDR = re.compile(
    r"GPU Direct RDMA (?:\(.*?\) )?(enabled?|disabled) for (?:HCA \d+ '(.+?)'|(GPU \S+ / HCA \d+.*))", re.IGNORECASE
)
IDENTITY = re.compile(r"\bcomm (0x[0-9a-fA-F]+) rank (\d+) n[rR]anks (\d+)\b(.*)$")
COMM_ID = re.compile(r"commId (0x[0-9a-fA-F]+) ")  # whole: something stands behind it
SPLIT = re.compile(r"parent (0x[0-9a-fA-F]+) (?:splitCount|childCount) (\d+) color (-?\d+)")
BUS_ID = re.compile(r"(?:nvmlDev (\d+) )?busId ([0-9a-fA-F]+)")
NODES = re.compile(r"nNodes (\d+) localRanks (\d+)")
RING_ORDER = re.compile(r"Channel (\d+)/(\d+) :((?: +\d+)+)( ?\.\.\.)?$")
RING_PLACE = re.compile(r"Ring (\d+) : (\d+) -> (\d+) -> (\d+)$")
TREES = re.compile(r"\[\d+\] (-?\d+(?:/-?\d+)*->\d+->-?\d+(?:/-?\d+)*)")
CHANNELS = re.compile(r"\b(\d{1,6}) (coll|collnet|nvls|p2p) channels(?! per)")
FAILED_AT = re.compile(r"([\w/]+\.(?:cc|h|cu):\d+ -> \d)\b")
LISTED = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+\d+)?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s+\[(?:0x|0000:)?(\w\w)"
)
MAX_RING = 20  # ranks that NCCL prints of a ring
_CONNECTION = re.compile(
    r"(?:Channel|Ring) (\d+)(?:/\d+)? : (\d+)(?:\[([0-9a-fA-F]+)\])? -> (\d+)(?:\[([0-9a-fA-F]+)\])?"
    r"(?: \[(send|receive)\])? via (.+?)(?: comm (0x[0-9a-fA-F]+).*)?$"
)
_NET = re.compile(r"NET/(.+?)/(\d+)(?:\((\d+)\))?((?:/GDRDMA(?:\(\w+\))?|/Shared)*)$")
_SEARCH = re.compile(
    r"Pattern (\d+), crossNic -?\d+, nChannels (\d+), (?:bw|speed) (\d+\.?\d*)/(\d+\.?\d*), type (\w+)/(\w+)"
)
_CHOICE = re.compile(r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?:.*channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?")
_KERNEL_CHOICE = re.compile(r"(\w+) \[([\w ]+)\]: (\d+) Bytes -> (?:Kernel )?(\S+)(?: nchannels (\d+))?")
_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout:\s*WorkNCCL\((.*?Timeout\(ms\) ?= ?\d+)\)"
    r"(?: ran for (\d+) milliseconds)?"
)
_PROGRESS = re.compile(
    r"(?:work: (\d+), )?last enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work: (-?\d+)", re.IGNORECASE
)
_TORCH_ERROR = re.compile(
    r"(?:NCCL error(?: in| \d)?|nccl[A-Z]\w+ failed): .*?((?:unhandled \w+|internal) error|invalid (?:usage|argument)"
    r"|remote process exited)",
    re.IGNORECASE,
)
_GROUP_AND_RANK = re.compile(r"\[(?:(PG [^\[\]]*?) )?Rank (\d+)\]|\[rank(\d+)\]")
_MAX_RANKS = 1 << 20
_MAX_CHANNELS = 1 << 10
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
_METHODS = ("CUMEM", "direct pointer", "IPC", "MNNVL")


def parse_connection(text: str, line: Line) -> Connection | None:
    """Parses a line such as ``Channel 02/0 : 7[7] -> 8[0] [send] via NET/IB/0(3)/GDRDMA``."""
    found = _CONNECTION.match(text)
    if found is None:
        return None
    channel, sender, receiver = int(found[1]), int(found[2]), int(found[4])
    if not (are_ranks(sender, receiver) and is_channel(channel)):
        return None
    via = found[7].strip()
    kind, _, method = ("SHM", "", "") if via.startswith("direct shared memory") else via.partition("/")
    net = _NET.match(via)
    is_cut = kind == "P2P" and method != "" and any(each.startswith(method) and each != method for each in _METHODS)
    if is_cut or (kind not in ("P2P", "SHM") and net is None):
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
        line=line,
    )


def parse_trees(text: str) -> tuple[int, set[int]] | None:
    """Parses a rank's places in the trees; returns the rank and all ranks that are named, None if it is broken."""
    named: set[int] = set()
    rank = None
    for shown in TREES.findall(text):
        parts = shown.split("->")
        numbers = [int(each) for part in parts for each in part.split("/")]
        if are_ranks(*(number for number in numbers if number >= 0)) and int(parts[1]) >= 0:
            rank = int(parts[1])
            named |= {number for number in numbers if number >= 0}
    return None if rank is None else (rank, named)


def parse_search(text: str, line: Line) -> SearchResult | None:
    """Parses a line such as ``Pattern 4, crossNic 0, nChannels 12, bw 20.0/20.0, type NVL/PIX, sameChannels 1``."""
    found = _SEARCH.match(text)
    if found is None:
        return None
    return SearchResult(int(found[1]), int(found[2]), found[5], found[6], float(found[3]), float(found[4]), line)


def parse_choice(text: str) -> Choice | None:
    """Parses a line of the tuner; algorithms and protocols of old versions are numbers."""
    if found := _KERNEL_CHOICE.match(text):
        channels = f"{found[5]} channels" if found[5] else ""
        return Choice(found[1], int(found[3]), f"{found[2]} {found[4]}", "", channels)
    found = _CHOICE.match(text)
    if found is None:
        return None
    channels = f"{found[5]}..{found[6]}" if found[5] else ""
    algorithm, protocol = _named(found[3], _ALGORITHMS), _named(found[4], _PROTOCOLS)
    return Choice(found[1] or "", int(found[2]), algorithm, protocol, channels)


def _named(shown: str, names: tuple[str, ...]) -> str:
    return names[int(shown)] if shown.isdecimal() and len(shown) < 3 and int(shown) < len(names) else shown.upper()


def parse_timeout(text: str, line: Line) -> Timeout | None:
    """Parses a line of PyTorch's watchdog that gives a collective up."""
    found = _TIMEOUT.search(text)
    who = _group_and_rank(text[: found.start()]) if found else None
    if found is None or who is None:
        return None
    named = dict(re.findall(r"(\w+(?:\(ms\))?) ?= ?(\[[^\]]*\]|[^,\s)]+)", found[1]))
    sequence = named.get("SeqNum", "")
    sizes = [f"{key}={named[key]}" for key in ("TensorShape", "NumelIn", "NumelOut") if key in named]
    return Timeout(
        rank=who[1],
        group=who[0],
        sequence=int(sequence) if sequence.isdecimal() else None,
        operation=named.get("OpType", "a collective"),
        sizes=", ".join(sizes),
        limit_s=int(named["Timeout(ms)"]) / 1000 if named.get("Timeout(ms)", "").isdecimal() else None,
        waited_s=None if found[2] is None else int(found[2]) / 1000,
        line=line,
    )


def parse_progress(text: str, line: Line) -> Progress | None:
    """Parses a line of PyTorch's watchdog that says how far a rank is; what cannot be true is left out."""
    found = _PROGRESS.search(text)
    who = _group_and_rank(text[: found.start()]) if found else None
    if found is None or who is None or int(found[3]) > int(found[2]):
        return None
    work = int(found[1]) if found[1] else None
    return Progress(rank=who[1], group=who[0], work=work, enqueued=int(found[2]), completed=int(found[3]), line=line)


def parse_torch_error(text: str) -> tuple[int | None, str] | None:
    """Parses an error of NCCL that PyTorch raised; returns the rank, if it is named, and NCCL's words.

    >>> parse_torch_error("[rank2]: DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled system error (run")
    (2, 'unhandled system error')
    """
    found = _TORCH_ERROR.search(text)
    if found is None:
        return None
    who = _group_and_rank(text[: found.start()])
    return (None if who is None else who[1]), found[1]


def _group_and_rank(text: str) -> tuple[str, int] | None:
    """Returns the rank that stands last in front of a message, and its process group, if it is named."""
    found = [(each[1] or "", int(each[2] or each[3])) for each in _GROUP_AND_RANK.finditer(text)]
    groups = [group for group, rank in found if group and rank == found[-1][1]]
    return ((groups or [""])[0], found[-1][1]) if found else None


def are_ranks(*numbers: int) -> bool:
    """Returns whether numbers can be ranks, and are no damage to the line."""
    return all(0 <= number < _MAX_RANKS for number in numbers)


def is_channel(number: int) -> bool:
    """Returns whether a number can be a channel's."""
    return 0 <= number < _MAX_CHANNELS
