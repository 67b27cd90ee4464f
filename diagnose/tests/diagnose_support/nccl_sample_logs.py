"""Logs as NCCL writes them, of jobs that never ran: the shapes of lines follow public reports and NCCL's sources."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import LogReader
from commopt_diagnose.nccl_log.terminal import print_log
from lightning_commopt.text.findings import Finding
from support.narrow import printed


@dataclass(frozen=True, kw_only=True)
class SampleJob:
    """A job whose log is written.

    Attributes:
        version: of NCCL; decides the shapes of lines.
        hosts: their names.
        gpus: ranks of each host.
        in_host: what stands behind ``via`` between ranks of a host.
        between: the same between hosts, with ``NET/`` in front.
        num_channels: of every pair.
        network: as in ``Using network``.
        nics: as in ``NET/IB : Using``; none writes that there is no device.
        settings: environment of all ranks.
        rank_settings: environment of one rank more.
        rank_versions: version that one rank prints instead.
        num_nodes: that NCCL counts, if not the number of hosts.
        stops: the rank that writes nothing behind its first line.
        absent: ranks that write nothing.
        notes: further messages, behind the topology of each rank.
        ends: further lines at the end of a rank's log.
    """

    version: str = "2.21.5+cuda12.4"
    hosts: Sequence[str] = ("node-a",)
    gpus: int = 4
    in_host: str = "P2P/CUMEM/read"
    between: str = "NET/IB/0/GDRDMA"
    num_channels: int = 2
    network: str = "IB"
    nics: Sequence[str] = ("mlx5_0:1/IB",)
    settings: dict[str, str] = field(default_factory=dict)
    rank_settings: dict[int, dict[str, str]] = field(default_factory=dict)
    rank_versions: dict[int, str] = field(default_factory=dict)
    num_nodes: int | None = None
    stops: int | None = None
    absent: Sequence[int] = ()
    notes: Sequence[str] = ()
    ends: dict[int, Sequence[str]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return len(self.hosts) * self.gpus

    @property
    def _minor(self) -> int:
        return int(self.version.split(".")[1])

    def rank_lines(self, rank: int) -> list[str]:
        """Returns all lines of one rank."""
        if rank in self.absent:
            return []
        host, device = self.hosts[rank // self.gpus], rank % self.gpus
        address = 10 + rank // self.gpus
        pid = 4000 + 10 * device + 1000 * (rank // self.gpus)
        main = f"{host}:{pid}:{pid} [{device}] NCCL INFO "
        thread = f"{host}:{pid}:{pid + 5} [{device}] NCCL INFO "
        settings = {**self.settings, **self.rank_settings.get(rank, {})}
        lines = [f"{main}Bootstrap : Using eth0:10.0.0.{address}<0>"]
        if self._minor >= 16:
            lines.append(f"{main}cudaDriverVersion 12040")
        version = self.rank_versions.get(rank, self.version)
        if rank == 0 or rank in self.rank_versions:
            lines.append(f"{main}NCCL version {version}" if self._minor >= 9 else f"NCCL version {version}")
        lines += [f"{main}{name} set by environment to {value}." for name, value in settings.items()]
        if self.nics:
            ports = " ".join(f"[{index}]{nic}" for index, nic in enumerate(self.nics))
            lines.append(f"{thread}NET/IB : Using {ports} [RO]; OOB eth0:10.0.0.{address}<0>")
        else:
            lines.append(f"{thread}NET/IB : No device found.")
            lines.append(f"{thread}NET/Socket : Using [0]eth0:10.0.0.{address}<0>")
        lines.append(f"{thread}Using network {self.network}")
        comm = f"comm 0x55d0{rank:04x} rank {rank} nranks {self.num_ranks} cudaDev {device}"
        named = f"{comm} nvmlDev {device} busId {device + 1}b000 commId 0x9e3779b97f4a7c15"
        call = "ncclCommInitRank " if self._minor >= 20 else ""
        if self._minor >= 18:
            lines.append(f"{thread}{call}{named} - Init START")
        if rank == self.stops:
            return lines
        if self._minor >= 20:
            nodes = self.num_nodes or len(self.hosts)
            lines.append(
                f"{thread}comm 0x55d0{rank:04x} rank {rank} nRanks {self.num_ranks} nNodes {nodes}"
                f" localRanks {self.num_ranks // nodes} localRank {device} MNNVL 0"
            )
        lines += [f"{thread}{note}" for note in self.notes]
        lines += [thread + message for message in self._graphs(rank)]
        if self.stops is not None:
            return lines + list(self.ends.get(rank, ()))
        late = f"{host}:{pid}:{pid + 9} [{device}] NCCL INFO "
        connects = late if self._minor >= 24 else thread  # at the first collective since 2.24, by another thread
        connected = [connects + message for message in self._connections(rank)]
        connected += [f"{connects}Connected all rings", f"{connects}Connected all trees"]
        ready = []
        if self._minor >= 20:
            ready.append(
                f"{thread}{self.num_channels} coll channels, 0 collnet channels, 0 nvls channels,"
                f" {self.num_channels} p2p channels, 1 p2p channels per peer"
            )
        done = named if self._minor >= 16 else f"{comm} busId {device + 1}b000"
        ready.append(f"{thread}{call}{done} - Init COMPLETE")
        lines += [*ready, *connected] if self._minor >= 24 else [*connected, *ready]
        return lines + list(self.ends.get(rank, ()))

    def _graphs(self, rank: int) -> list[str]:
        found = []
        if rank == 0 and self._minor >= 5:
            order = "".join(f"{each:4d}" for each in range(self.num_ranks))
            found = [f"Channel {c:02d}/{self.num_channels:02d} :{order}" for c in range(self.num_channels)]
        above, below = rank - 1, rank + 1 if rank + 1 < self.num_ranks else -1
        if self._minor < 5:
            place = f"{above}->{rank}->{below}/-1/-1"
        else:
            place = f"{below}/-1/-1->{rank}->{above}"
            place += f"|{above}->{rank}->{below}/-1/-1" if self._minor < 7 else ""
        return [*found, "Trees " + " ".join(f"[{c}] {place}" for c in range(self.num_channels))]

    def _connections(self, rank: int) -> list[str]:
        found = []
        after, before = (rank + 1) % self.num_ranks, (rank - 1) % self.num_ranks
        for channel in range(self.num_channels):
            if after != rank and after // self.gpus == rank // self.gpus:
                found.append(self._connection(channel, rank, after, "", self.in_host))
            elif after != rank:
                found.append(self._connection(channel, rank, after, " [send]", self.between))
            if before // self.gpus != rank // self.gpus:
                found.append(self._connection(channel, before, rank, " [receive]", self.between))
            elif "NET" in self.in_host and before != rank:
                found.append(self._connection(channel, before, rank, " [receive]", self.in_host))
        return found

    def _connection(self, channel: int, sender: int, receiver: int, direction: str, via: str) -> str:
        word = "Ring" if self._minor < 7 else "Channel"
        index = "/0" if self._minor >= 12 else ""
        ends = [
            f"{rank}[{rank % self.gpus}]" if self._minor >= 17 else f"{rank}[{rank % self.gpus + 1}b000]"
            for rank in (sender, receiver)
        ]
        direction = direction or (" [send]" if via.startswith("NET") else "")
        return f"{word} {channel:02d}{index} : {ends[0]} -> {ends[1]}{direction} via {via}"

    def text(self) -> str:
        """Returns the log of all ranks, one after the other."""
        return "".join(f"{line}\n" for rank in range(self.num_ranks) for line in self.rank_lines(rank))

    def mixed(self, seed: int = 0) -> str:
        """Returns the log of all ranks in one stream: lines of a rank keep their order."""
        chance = random.Random(seed)
        waiting = [lines for rank in range(self.num_ranks) if (lines := self.rank_lines(rank))]
        found = []
        while waiting:
            lines = chance.choice(waiting)
            found.append(lines.pop(0))
            waiting = [each for each in waiting if each]
        return "".join(f"{line}\n" for line in found)

    def write(self, folder: Path) -> list[Path]:
        """Writes a file for each rank."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"rank_{rank}.log" for rank in range(self.num_ranks)]
        for rank, path in enumerate(paths):
            path.write_text("".join(f"{line}\n" for line in self.rank_lines(rank)))
        return paths


HEALTHY = SampleJob(hosts=("node-a", "node-b"))
"""Two hosts with NVLink in each and InfiniBand with GPUDirect RDMA between them."""
SOCKETS = dataclasses.replace(HEALTHY, nics=(), network="Socket", between="NET/Socket/0", in_host="P2P/CUMEM")

SLOW = SampleJob(
    hosts=("node-a", "node-b"),
    gpus=2,
    in_host="SHM/direct/direct",
    between="NET/IB/0",
    settings={"NCCL_P2P_DISABLE": "1"},
    rank_settings={3: {"NCCL_ALGO": "Tree"}},
    notes=("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",),
)
"""The slow job of docs/nccl_log.md: two settings and a missing kernel module."""

BROKEN = SampleJob(
    hosts=("node-a", "node-b"),
    gpus=2,
    ends={
        1: (
            "",
            "node-a:4010:4020 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.11<47652>"
            " with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_0",
            "[rank1]:[E1122 14:02:11.4 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout:"
            " WorkNCCL(SeqNum=318, OpType=ALLREDUCE, NumelIn=6553600, NumelOut=6553600, Timeout(ms)=600000)"
            " ran for 600040 milliseconds before timing out.",
        )
    },
)
"""A job whose link broke."""


def read_file(path: Path) -> NcclLog:
    """Reads a file, which may have no line of NCCL."""
    reader = LogReader()
    reader.read(path)
    return reader.finish()


def read(*texts: str) -> NcclLog:
    """Reads a file with these texts, each of whole lines."""
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.writelines(text if text.endswith("\n") else f"{text}\n" for text in texts)
        file.flush()
        return read_file(Path(file.name))


def told(text: str, *, host: str = "a", pid: int = 7, tid: int = 8, device: int = 0) -> str:
    """Returns a line of NCCL."""
    return f"{host}:{pid}:{tid} [{device}] NCCL INFO {text}\n"


def findings(*texts: str) -> dict[str, Finding]:
    """Returns what is found in lines, by code."""
    return {finding.code: finding for finding in find_all(read(*texts))}


def shown(*texts: str) -> str:
    """Returns what is printed about lines, without findings."""
    log = read(*texts)
    return printed(lambda console: print_log(log, [], console), 200, is_terminal=False)


def watchdog(
    rank: int, sequence: int, operation: str = "ALLREDUCE", *, numel: int = 8, waited_ms: int = 600_081, group: str = ""
) -> str:
    """Returns PyTorch's line of a collective that timed out."""
    ended = f"[{group} Rank {rank}] Process group watchdog thread terminated with exception: " if group else ""
    return (
        f"[rank{rank}]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] {ended}[Rank {rank}] Watchdog caught"
        f" collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn={numel},"
        f" NumelOut={numel}, Timeout(ms)=600000) ran for {waited_ms} milliseconds before timing out.\n"
    )


RCCL = """\
[lib] load RCCL version: 2.27.7
[2026-08-23 09:56:58] node [0] /rccl/src/init.cc:213 NCCL WARN Missing "iommu=pt" from kernel command line
node [0] NCCL INFO RCCL version : 2.27.7-HEAD:29e1567
node [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
node [0] NCCL INFO NET/IB : No device found.
node [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0> [1]tailscale0:100.64.0.7<0>
"""
PLUGIN = """\
h:7:7 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
h:7:7 [0] NCCL INFO NET/Plugin: Plugin load returned 0 : libc.so.6: version `GLIBC_2.34' not found (libnccl-net.so)
h:7:9 [0] NCCL INFO Using network Socket
Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
TRACEBACK = """\
[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, invalid usage, NCCL version 2.19.3
[rank3]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank3]: Last error:
[rank3]: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000
"""
