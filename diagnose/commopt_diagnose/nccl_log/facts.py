"""What processes and ranks report in NCCL's log: facts, before anything is concluded from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from commopt_diagnose.nccl_log.lines import Message
from lightning_commopt.text.findings import Line


@dataclass(kw_only=True)
class TornLines:
    """The lines of a file in which several processes wrote into each other, or those that are left out."""

    first: Line
    count: int = 0
    last_number: int = 0  # number of the last such line

    @property
    def line(self) -> Line:
        return self.first


class Choice(NamedTuple):
    """What NCCL's tuner chose for a message."""

    operation: str  # "" if unknown
    num_bytes: int
    algorithm: str  # such as RING, TREE, NVLS
    protocol: str  # LL, LL128 or SIMPLE; "" for kernels that have none
    channels: str  # the channels as in the line, such as 0..7; "" if unknown


class Fact(NamedTuple):
    """A value, and the line that has it."""

    value: str
    line: Line


class Machine(NamedTuple):
    """A host, as its ranks name it. Containers may share the name; then the bootstrap's address differs."""

    host: str
    address: str  # "" if unknown


class Connection(NamedTuple):
    """A connection from one rank to another, on one channel."""

    channel: int
    sender: int
    receiver: int
    direction: str  # the side that wrote the line, send or receive; "" if both are on one host
    kind: str  # P2P, SHM or NET
    method: str  # such as CUMEM, IPC, direct pointer, direct/direct, IB, Socket
    nic: int | None
    proxy_rank: int | None  # the rank whose NIC sends in the sender's place (PXN)
    has_gdr: bool  # whether the NIC reads and writes the GPU's memory
    labels: tuple[str, str]  # sender's and receiver's device; before NCCL 2.17 their GPU's bus id
    line: Line

    @property
    def pair(self) -> tuple[int, int]:
        return self.sender, self.receiver

    @property
    def path(self) -> str:
        return "/".join(filter(None, (self.kind, self.method, "GDRDMA" if self.has_gdr else "")))

    @property
    def is_multi_node_nvlink(self) -> bool:
        """Whether NVLink may join its ends across hosts (MNNVL). NCCL then calls all NVLinks so."""
        return self.method.startswith("MNNVL")

    @property
    def is_between_hosts(self) -> bool:
        """Whether both ends have one bus id, which a host has only once; a device number has fewer digits."""
        sender, receiver = self.labels
        return self.kind == "NET" and sender == receiver and len(sender) > 2


@dataclass(kw_only=True, eq=False)
class Process:
    """What a process reported that holds for all of its ranks, and what its ranks did.

    A thread sets up one communicator after the other, and its lines belong to the one that it named last. Lines of a
    thread that has not named any are kept apart: `group_members` finds out whose they are, once everything is read.
    """

    host: str = ""  # "" if the heads of its lines are missing
    pid: int | None = None
    address: str = ""  # address of the bootstrap; in a cut log perhaps from another process of the host
    bootstrap: Fact | None = None  # interface and address of the bootstrap
    version: Fact | None = None
    driver: Fact | None = None
    network: Fact | None = None  # IB, Socket or a plugin's name
    settings: dict[str, Fact] = field(default_factory=dict)  # environment variables that NCCL has read
    set_by_plugin: set[str] = field(default_factory=set)  # those among them that a network plugin has set
    nics: dict[str, Line] = field(default_factory=dict)  # NICs, such as mlx5_0:1/IB
    interfaces: dict[str, Fact] = field(default_factory=dict)  # names of network interfaces to their addresses
    gdr: dict[str, Line] = field(default_factory=dict)  # NICs, with the line on whether they have GPUDirect RDMA
    failed_at: Fact | None = None  # the first "file:line -> code" with which NCCL passes an error on
    failed_tid: int | None = None
    uses_p2p: bool = False  # whether any of its connections uses P2P
    # Each connection once, as its line says it: communicators mostly have the same ones, so they share these.
    connections: dict[tuple[int, int, int, str, str], Connection] = field(default_factory=dict)
    notes: dict[str, Line] = field(default_factory=dict)  # facts that hold for the whole process, by short names
    # In the order of their first lines. Threads that have not named a communicator have a member of their own here.
    members: list[Member] = field(default_factory=list)
    by_address: dict[str, Member] = field(default_factory=dict)  # members that are not destroyed
    by_comm: dict[tuple[str, str, int], Member] = field(default_factory=dict)  # keys: communicator, address, rank
    by_thread: dict[tuple[int | None, int | None], Member] = field(default_factory=dict)  # what each thread named last

    @property
    def machine(self) -> Machine:
        return Machine(self.host, self.address)

    def find_member(self, message: Message) -> Member | None:
        """Returns the member that a line's thread named last; None if it has named none."""
        member = self.by_thread.get(message.thread)
        return None if member is not None and member.ended is not None else member

    def member(self, message: Message, *, begins: bool = False, rank: int | None = None) -> Member:
        """Returns the member that a line belongs to: a new one if its thread has none, or a communicator begins."""
        member = self.find_member(message)
        if member is not None and begins and member.finished is not None and not member.is_repeated:
            member = None
        if member is not None and rank is not None and member.rank not in (None, rank):
            # The thread may be setting up another communicator at the same time, or the log may not name threads.
            fitting = (own for own in reversed(self.members) if own.rank == rank and own.device == message.device)
            member = next((own for own in fitting if own.finished is None and own.ended is None), None)
        if member is None:
            member = self._new_member(message)
        if rank is not None:
            member.rank = rank
        return member

    def named_member(self, message: Message, address: str, rank: int, num_ranks: int, comm_id: str | None) -> Member:
        """Returns the member with this address: known, or the one whose first lines did not name it, or a new one.

        Once a communicator is destroyed, another may have its address; the log need not show that.
        """
        member = self.by_address.get(address)
        if member is None and comm_id and (again := self.by_comm.get((comm_id, address, rank))):
            member, again.ended = again, None  # an id belongs to one communicator, so this line is repeated
        is_known = member is not None and (member.rank, member.num_ranks) == (rank, num_ranks)
        if member is None or not is_known or (comm_id and member.comm_id not in (None, comm_id)):
            member = self.find_member(message)
            is_open = member is not None and not member.address and member.finished is None
            if member is None or not is_open or member.rank not in (None, rank) or member.min_ranks > num_ranks:
                member = self._new_member(message)
        member.address, member.rank, member.num_ranks = address, rank, num_ranks
        if comm_id:
            self.by_comm[comm_id, address, rank] = member
        self.by_address[address] = self.by_thread[message.thread] = member
        return member

    def _new_member(self, message: Message) -> Member:
        member = Member(process=self, device=message.device, file=message.file)
        self.members.append(member)
        self.by_thread[message.thread] = member
        return member


class SearchResult(NamedTuple):
    """A topology that NCCL searched for, printed with ``NCCL_DEBUG_SUBSYS=GRAPH``."""

    pattern: int  # 4 is the ring, 1 to 3 are trees and CollNet, 5 is NVLS
    num_channels: int
    intra: str  # slowest link within a host, such as NVL, PIX or SYS
    inter: str  # slowest link to a NIC
    intra_gb_per_s: float  # bandwidth of a channel within a host
    inter_gb_per_s: float  # bandwidth of a channel between hosts
    line: Line


@dataclass(kw_only=True, eq=False)
class Member:
    """What one rank of one communicator reported; or lines of a thread, until it is known whose they are.

    Everything that is None or empty is unknown.
    """

    process: Process
    device: int | None = None
    file: str = ""  # the file of its first line
    rank: int | None = None
    num_ranks: int | None = None
    min_ranks: int = 1
    address: str = ""  # the log's name for the communicator in this process
    comm_id: str | None = None  # equal on all ranks; None before NCCL 2.16
    parent: str = ""  # address of the communicator that this one was split from
    split: str = ""  # how it was split: the count and the color
    num_nodes: int | None = None
    bus_id: str = ""
    nvml_device: int | None = None  # number of the GPU outside of CUDA_VISIBLE_DEVICES
    connected: int = 0  # number of the line with its first connection; 0 for none
    started: Line | None = None
    finished: Line | None = None
    ended: Line | None = None  # destroyed or aborted
    is_repeated: bool = False  # whether its first line came again: the log has these lines several times
    last: Message | None = None
    stage: int = 0  # how far its lines prove that it got, as an index of `findings.STAGES`
    connections: dict[tuple[int, int, int, str, str], Connection] = field(default_factory=dict)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the ring of each channel; only rank 0 prints them
    has_trees: bool = False
    channels: dict[str, int] = field(default_factory=dict)  # number of channels of a kind: coll, collnet, nvls, p2p
    searches: list[SearchResult] = field(default_factory=list)
    listed_gpu: str = ""  # bus id of the GPU whose links the topology lists at the moment
    nvlinks: dict[tuple[str, str], Line] = field(default_factory=dict)  # NVLinks between the bus ids of two GPUs
    notes: dict[str, Line] = field(default_factory=dict)

    @property
    def owner(self) -> tuple[Process, int | None]:
        """The process and the GPU, which have one rank in a communicator."""
        return self.process, self.device

    def reach(self, stage: int, *ranks: int) -> None:
        """Notes how far initialization is, and ranks that the communicator has."""
        self.stage = max(self.stage, stage)
        for rank in ranks:
            if rank >= self.min_ranks:
                self.min_ranks = rank + 1

    def is_gpu(self, label: str) -> bool:
        """Returns whether the label in brackets behind a rank can be this rank's GPU."""
        numbers = str(self.device), str(self.nvml_device)
        return not label or not self.bus_id or label in numbers or label.lstrip("0") == self.bus_id.lstrip("0")

    def absorb(self, other: Member) -> None:
        """Takes over lines of another thread."""
        self.rank = other.rank if self.rank is None else self.rank
        self.reach(other.stage, other.min_ranks - 1)
        for name in ("connections", "rings", "channels", "nvlinks", "notes"):
            getattr(self, name).update(getattr(other, name))
        self.searches += other.searches
        self.last = max(filter(None, (self.last, other.last)), key=lambda message: message.number, default=None)
