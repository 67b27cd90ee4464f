"""What processes, ranks and communicators report in NCCL's log: facts, before anything is concluded from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lightning_commopt.commands.nccl_log.inspector import Inspected, Matched
from lightning_commopt.commands.nccl_log.lines import Message
from lightning_commopt.text.findings import Line
from lightning_commopt.text.formatting import grouped


@dataclass(frozen=True, kw_only=True)
class LoggedWarning:
    """An ``NCCL WARN`` line, or an error of NCCL that PyTorch reports."""

    text: str
    place: str = ""  # file and line of NCCL
    host: str
    rank: int | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Timeout:
    """A collective that PyTorch's watchdog gave up."""

    rank: int
    group: str  # "" if unknown
    sequence: int | None  # None before torch 2.0
    operation: str  # such as ALLREDUCE
    sizes: str  # elements in and out, as the line has them
    limit_s: float | None
    waited_s: float | None
    line: Line


class Progress(NamedTuple):
    """How far a rank was when PyTorch's watchdog acted."""

    rank: int
    group: str  # "" if unknown
    work: int | None  # number of the collective that failed
    enqueued: int  # number of its last collective that was started
    completed: int
    line: Line


class RasReport(NamedTuple):
    """A part of the report: what is wrong with a communicator, or with the job."""

    comm_id: str  # "" for the job
    status: str
    line: Line
    details: list[str]


class Choice(NamedTuple):
    """What NCCL's tuner chose for a message."""

    operation: str  # "" if unknown
    num_bytes: int
    algorithm: str  # such as RING, TREE, NVLS
    protocol: str  # LL, LL128 or SIMPLE; "" for kernels that have none
    channels: str  # as the line has them, such as 0..7; "" if unknown


class Fact(NamedTuple):
    """A value, and the line that has it."""

    value: str
    line: Line


class Machine(NamedTuple):
    """A host, as its ranks name it: containers may share the name, and differ by the bootstrap's address."""

    host: str
    address: str  # "" if unknown


class Connection(NamedTuple):
    """A connection from one rank to another, on one channel."""

    channel: int
    sender: int
    receiver: int
    direction: str  # send or receive, which side wrote the line; "" where both are on one host
    kind: str  # P2P, SHM or NET
    method: str  # such as CUMEM, IPC, direct pointer, direct/direct, IB, Socket
    nic: int | None
    proxy_rank: int | None  # whose NIC sends in the place of the sender's (PXN)
    has_gdr: bool  # whether the NIC reads and writes the GPU's memory
    labels: tuple[str, str]  # of sender and receiver: the device, before NCCL 2.17 the GPU's bus id
    line: Line

    @property
    def pair(self) -> tuple[int, int]:
        return self.sender, self.receiver

    @property
    def path(self) -> str:
        return "/".join(filter(None, (self.kind, self.method, "GDRDMA" if self.has_gdr else "")))

    @property
    def is_between_hosts(self) -> bool:
        """Whether both ends have one bus id, which a host has only once; a device number has fewer digits."""
        sender, receiver = self.labels
        return self.kind == "NET" and sender == receiver and len(sender) > 2


@dataclass(kw_only=True, eq=False)
class Process:
    """What a process reported that holds for all of its ranks."""

    host: str = ""  # "" where the heads of its lines are missing
    pid: int | None = None
    address: str = ""  # of the bootstrap; of another process of the host, where a log was cut
    bootstrap: Fact | None = None  # interface and address
    version: Fact | None = None
    driver: Fact | None = None
    network: Fact | None = None  # IB, Socket or a plugin's name
    settings: dict[str, Fact] = field(default_factory=dict)  # variables of the environment that NCCL read
    nics: dict[str, Line] = field(default_factory=dict)  # such as mlx5_0:1/IB
    interfaces: dict[str, Fact] = field(default_factory=dict)  # addresses by name
    gdr: dict[str, Line] = field(default_factory=dict)  # of each NIC, whether it has GPUDirect RDMA
    failed_at: Fact | None = None  # the first "file:line -> code" with which NCCL hands an error on
    failed_tid: int | None = None
    uses_p2p: bool = False  # on any connection of any communicator
    notes: dict[str, Line] = field(default_factory=dict)  # facts that there is one of, by a name of ours

    @property
    def machine(self) -> Machine:
        return Machine(self.host, self.address)


class SearchResult(NamedTuple):
    """A topology that NCCL searched for, printed with ``NCCL_DEBUG_SUBSYS=GRAPH``."""

    pattern: int  # 4 is the ring, 1 to 3 are trees and CollNet, 5 is NVLS
    num_channels: int
    intra: str  # slowest link within a host, such as NVL, PIX or SYS
    inter: str  # slowest link to a NIC
    intra_gb_per_s: float  # of a channel
    inter_gb_per_s: float
    line: Line


@dataclass(kw_only=True, eq=False)
class Member:
    """What one rank of one communicator reported; or lines of a thread, until it is known whose they are."""

    process: Process
    device: int | None = None
    file: str = ""  # of its first line
    rank: int | None = None  # None if unknown, as all of these
    num_ranks: int | None = None
    min_ranks: int = 1
    address: str = ""  # the log's name for the communicator in this process
    comm_id: str | None = None  # equal on all ranks; None before NCCL 2.16
    parent: str = ""  # address of the communicator that this one was split from
    split: str = ""  # how: the count and the colour
    num_nodes: int | None = None
    bus_id: str = ""
    nvml_device: int | None = None  # number of the GPU outside of CUDA_VISIBLE_DEVICES
    started: Line | None = None
    finished: Line | None = None
    ended: Line | None = None  # destroyed or aborted
    last: Message | None = None
    stage: int = 0  # how far its lines prove that it came, a place in `findings.STAGES`
    connections: dict[tuple[int, int, int, str, str], Connection] = field(default_factory=dict)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by channel; rank 0 prints them
    has_trees: bool = False
    channels: dict[str, int] = field(default_factory=dict)  # by kind: coll, collnet, nvls, p2p
    searches: list[SearchResult] = field(default_factory=list)
    listed_gpu: str = ""  # bus id of the GPU whose links the topology lists at the moment
    nvlinks: dict[tuple[str, str], Line] = field(default_factory=dict)  # from one GPU to another, by bus id
    notes: dict[str, Line] = field(default_factory=dict)

    @property
    def owner(self) -> tuple[Process, int | None]:
        """The process and the GPU, which have one rank in a communicator."""
        return self.process, self.device

    def reach(self, stage: int, *ranks: int) -> None:
        """Notes how far initialization is, and ranks that the communicator has."""
        self.stage = max(self.stage, stage)
        self.min_ranks = max(self.min_ranks, *(rank + 1 for rank in ranks), 1)

    def is_gpu(self, label: str) -> bool:
        """Returns whether what stands in brackets behind a rank can be this rank's GPU."""
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


@dataclass(kw_only=True, eq=False)
class Communicator:
    """The ranks of a communicator."""

    number: int  # in the order of the log, from 1; 0 for processes that name no communicator
    members: dict[int, Member] = field(default_factory=dict)  # by rank
    unknown: list[Member] = field(default_factory=list)  # their rank or communicator is unknown
    count: int = 1  # communicators of one size that the log does not tell apart; more than 1 before NCCL 2.16

    @property
    def all_members(self) -> list[Member]:
        return [*self.members.values(), *self.unknown]

    @property
    def num_ranks(self) -> int | None:
        return next((each.num_ranks for each in self.all_members if each.num_ranks is not None), None)

    @property
    def min_ranks(self) -> int:
        """Ranks that it has at least."""
        return max(
            [self.num_ranks or 1, *(each.min_ranks for each in self.all_members), *(r + 1 for r in self.members)]
        )

    @cached_property
    def num_nodes(self) -> int | None:
        """Nodes that NCCL sees; None if no line has it and not all ranks are there."""
        named = next((each.num_nodes for each in self.all_members if each.num_nodes is not None), None)
        are_known = named is None and self.is_complete and all(machine.host for machine in self.machines)
        return len(self.machines) if are_known else named

    @property
    def is_complete(self) -> bool:
        """Whether each of its ranks is known."""
        return self.num_ranks is not None and len(self.members) == self.num_ranks and self.count == 1

    @property
    def missing(self) -> list[int]:
        """Ranks that wrote nothing."""
        return sorted(set(range(self.num_ranks or 0)) - set(self.members))

    @property
    def machines(self) -> dict[Machine, list[int]]:
        return grouped((member.process.machine, rank) for rank, member in sorted(self.members.items()))

    @property
    def spans_hosts(self) -> bool | None:
        """Whether there are several hosts; None if unknown."""
        if self.num_nodes is not None:
            return self.num_nodes > 1
        hosts = {each.process.host for each in self.all_members if each.process.host}
        if len(hosts) > 1 or any(each.is_between_hosts for each in self.connections):
            return True
        return False if self.num_ranks == 1 else None

    @cached_property
    def connections(self) -> list[Connection]:
        return [each for member in self.all_members for each in member.connections.values()]

    @property
    def processes(self) -> list[Process]:
        return list(dict.fromkeys(member.process for member in self.all_members))


@dataclass(kw_only=True)
class NcclLog:
    """Everything that was read from the files."""

    files: list[str] = field(default_factory=list)
    num_lines: int = 0  # of NCCL
    silent_files: list[str] = field(default_factory=list)  # without a line of NCCL
    damaged_files: dict[str, str] = field(default_factory=dict)  # compressed, and cut or changed: why reading has ended
    versions: dict[str, Fact] = field(default_factory=dict)  # that lines without a process name
    packages: dict[str, Fact] = field(default_factory=dict)  # of Python; the job may load another NCCL
    listed: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)  # by nccl-tests: host, pid, device, bus
    processes: list[Process] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    warnings: list[LoggedWarning] = field(default_factory=list)
    timeouts: dict[tuple[object, ...], Timeout] = field(default_factory=dict)  # each once: PyTorch repeats them
    progress: dict[tuple[int, str], Progress] = field(default_factory=dict)  # the last of each rank and group
    ras: list[RasReport] = field(default_factory=list)
    choices: Counter[Choice] = field(default_factory=Counter)
    choice_lines: dict[Choice, Line] = field(default_factory=dict)  # the first
    inspected: Inspected = field(default_factory=Inspected)
    matched: list[Matched] = field(default_factory=list)  # with the steps of a run

    def rest(self) -> Communicator:
        """Processes that name no communicator."""
        known = {member.process for each in self.communicators for member in each.all_members}
        processes = [process for process in self.processes if process not in known]
        return Communicator(number=0, unknown=[Member(process=process) for process in processes])
