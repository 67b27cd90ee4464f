"""What NCCL's log says: facts, before anything is concluded from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_commopt.commands.nccl_log.events import Choice, LoggedWarning, Progress, Timeout
from lightning_commopt.text.findings import Line


class Fact(NamedTuple):
    """A value, and the line that says it."""

    value: str
    line: Line


class Machine(NamedTuple):
    """A host, as its ranks name it.

    Attributes:
        host: its name, which containers may share.
        address: where NCCL's bootstrap listens; "" where the log does not say.
    """

    host: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A connection from one rank to another, on one channel.

    Attributes:
        channel: its number.
        sender: rank that sends.
        receiver: rank that receives.
        direction: ``send`` or ``receive``, which side wrote the line; "" where both are on one host.
        kind: ``P2P``, ``SHM`` or ``NET``.
        method: such as ``CUMEM``, ``IPC``, ``direct pointer``, ``direct/direct``, ``IB``, ``Socket``.
        nic: number of the network device.
        proxy_rank: rank whose NIC sends in the place of the sender's (PXN).
        has_gdr: whether the NIC reads and writes the GPU's memory.
        line: where it stands.
    """

    channel: int
    sender: int
    receiver: int
    direction: str = ""
    kind: str
    method: str = ""
    nic: int | None = None
    proxy_rank: int | None = None
    has_gdr: bool = False
    line: Line

    @property
    def path(self) -> str:
        shown = f"{self.kind}/{self.method}" if self.method else self.kind
        return f"{shown}/GDRDMA" if self.has_gdr else shown


@dataclass(kw_only=True)
class Process:
    """What a process said that holds for all of its ranks.

    Attributes:
        host: its host; "" where the heads of its lines are missing.
        pid: its number, likewise.
        address: of the bootstrap; of another process of the host, where a cut log does not say.
        bootstrap: interface and address for setting up connections.
        version: of NCCL.
        driver: of CUDA, as NCCL prints it.
        network: ``IB``, ``Socket`` or a plugin's name.
        settings: variables of the environment that NCCL read.
        nics: names of InfiniBand and RoCE ports, such as ``mlx5_0:1/IB``.
        interfaces: names and addresses for NET/Socket.
        notes: facts that there is one of, by a name of ours.
    """

    host: str = ""
    pid: int | None = None
    address: str = ""
    bootstrap: Fact | None = None
    version: Fact | None = None
    driver: Fact | None = None
    network: Fact | None = None
    settings: dict[str, Fact] = field(default_factory=dict)
    nics: dict[str, Line] = field(default_factory=dict)
    interfaces: dict[str, Fact] = field(default_factory=dict)
    notes: dict[str, Line] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        """The host; containers of one name on several machines differ by their addresses."""
        return Machine(self.host, self.address)

    @property
    def interface(self) -> str:
        return "" if self.bootstrap is None else self.bootstrap.value.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """One topology that NCCL searched for, printed with ``NCCL_DEBUG_SUBSYS=GRAPH``.

    Attributes:
        pattern: 4 is the ring, 1 to 3 are trees and CollNet, 5 is NVLS.
        num_channels: that it found.
        intra: slowest link within a host, such as ``NVL``, ``PIX`` or ``SYS``.
        inter: slowest link to a NIC, likewise.
        intra_gb_per_s: of a channel.
        inter_gb_per_s: likewise.
        line: where it stands.
    """

    pattern: int
    num_channels: int
    intra: str
    inter: str
    intra_gb_per_s: float
    inter_gb_per_s: float
    line: Line


@dataclass(kw_only=True, eq=False)
class Member:
    """What one rank of one communicator said.

    Attributes:
        process: that it is in.
        device: CUDA device.
        rank: None where the log does not say.
        num_ranks: of the communicator, likewise.
        address: of the communicator in this process; the log's name for it.
        comm_id: equal on all ranks of a communicator; None before NCCL 2.16.
        parent: address of the communicator that this one was split from.
        split: how it was split: the count and the colour.
        num_nodes: that NCCL sees.
        num_local_ranks: on this rank's node.
        bus_id: of the GPU.
        started: the line in which initialization started.
        finished: the line in which it was complete.
        ended: the line in which it was destroyed or aborted.
        last: its last line.
        connections: without duplicates, by what they connect.
        rings: order of ranks by channel, which one rank prints.
        trees: ``(children, parent)`` by channel.
        channels: numbers by kind: ``coll``, ``collnet``, ``nvls``, ``p2p``.
        searches: topologies that NCCL searched for.
        init_s: seconds that initialization took, by part, and ``total``.
        init_line: where they stand.
        calls: collectives that it called, by NCCL's counter, which grouped calls and some versions repeat.
        notes: facts that there is one of, by a name of ours.
    """

    process: Process
    device: int | None = None
    rank: int | None = None
    num_ranks: int | None = None
    address: str = ""
    comm_id: str | None = None
    parent: str = ""
    split: str = ""
    num_nodes: int | None = None
    num_local_ranks: int | None = None
    bus_id: str = ""
    started: Line | None = None
    finished: Line | None = None
    ended: Line | None = None
    last: Line | None = None
    connections: dict[tuple[int, int, int, str, str], Connection] = field(default_factory=dict)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trees: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    searches: list[SearchResult] = field(default_factory=list)
    init_s: dict[str, float] = field(default_factory=dict)
    init_line: Line | None = None
    calls: dict[int, list[Fact]] = field(default_factory=dict)
    notes: dict[str, Line] = field(default_factory=dict)

    @property
    def num_channels(self) -> int:
        """Channels of collectives; where they are not printed, those that have been seen."""
        seen = [channel for channel, *_ in self.connections] + list(self.rings) + list(self.trees)
        return self.channels.get("coll") or (max(seen) + 1 if seen else 0)


@dataclass(kw_only=True, eq=False)
class Communicator:
    """The ranks of a communicator.

    Attributes:
        number: in the order of the log, from 1.
        members: by rank; those whose rank is not known are left out.
        unknown: members whose rank the log does not say.
    """

    number: int
    members: dict[int, Member] = field(default_factory=dict)
    unknown: list[Member] = field(default_factory=list)

    @property
    def num_ranks(self) -> int | None:
        return next((each.num_ranks for each in self.members.values() if each.num_ranks is not None), None)

    @property
    def num_nodes(self) -> int | None:
        """Nodes that NCCL sees; None where no line says so."""
        return next((each.num_nodes for each in self.members.values() if each.num_nodes is not None), None)

    @property
    def missing(self) -> list[int]:
        """Ranks that wrote nothing."""
        return sorted(set(range(self.num_ranks or 0)) - set(self.members))

    @property
    def machines(self) -> dict[Machine, list[int]]:
        found: dict[Machine, list[int]] = {}
        for rank, member in sorted(self.members.items()):
            found.setdefault(member.process.machine, []).append(rank)
        return found

    @property
    def connections(self) -> list[Connection]:
        return [each for _, member in sorted(self.members.items()) for each in member.connections.values()]

    @property
    def rings(self) -> dict[int, tuple[int, ...]]:
        """Order of ranks by channel."""
        return {channel: ring for member in self.members.values() for channel, ring in sorted(member.rings.items())}


@dataclass(kw_only=True)
class NcclLog:
    """All that the files say.

    Attributes:
        files: that were read, in this order.
        num_lines: of NCCL.
        silent_files: those without a line of NCCL.
        versions: that lines without a process name.
        processes: in the order of their first lines.
        communicators: likewise.
        warnings: in their order.
        timeouts: each once: PyTorch repeats them.
        progress: the last of each rank and process group.
        choices: how often the tuner chose what.
        choice_lines: the first line of each choice.
    """

    files: list[str] = field(default_factory=list)
    num_lines: int = 0
    silent_files: list[str] = field(default_factory=list)
    versions: dict[str, Fact] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)
    timeouts: dict[tuple[object, ...], Timeout] = field(default_factory=dict)
    progress: dict[tuple[int, str], Progress] = field(default_factory=dict)
    choices: Counter[Choice] = field(default_factory=Counter)
    choice_lines: dict[Choice, Line] = field(default_factory=dict)
