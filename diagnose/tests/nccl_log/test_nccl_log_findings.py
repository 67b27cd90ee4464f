"""What nccl-log finds in logs of one kind each, after the shapes of public ones.

It is in ``golden/findings.txt``, a block for each of `LOGS`, whose name says what a reader needs to hear.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from commopt_diagnose import nccl_log
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.warn_texts import explain
from diagnose_support.nccl_sample_logs import HEALTHY, PLUGIN, RCCL, SOCKETS, TRACEBACK, SampleJob, read, told, watchdog
from lightning_commopt.text.findings import read_texts

HEAD = "node-a:10:11 [0] NCCL INFO "
BOOTSTRAP = told("Bootstrap : Using eth0:10.0.0.1<0>")
TIMEOUTS = watchdog(0, 7), watchdog(1, 7)
TCP = told("Channel 00 : 1[1e0] -> 0[1e0] [receive] via NET/Socket/0")
LIBIBVERBS = "a:7:8 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]"
CUT = """\
h1:7:9 [1] NCCL INFO NET/IB : No device found.
h1:7:9 [1] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.3<0>
h1:7:9 [1] NCCL INFO Using network Socket
h1:7:9 [1] NCCL INFO ncclCommInitRank comm 0xb9 rank 1 nranks 16 cudaDev 1 nvmlDev 1 busId 7e0 commId 0x89 - Init START
h1:7:9 [1] NCCL INFO Setting affinity for GPU 1 to ffff
"""
NVLS = """\
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled cuda error
ncclUnhandledCudaError: Call to CUDA function failed.
Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'.
"""
RETRY = "socketPollConnect: connect to 10.0.0.9<4321> returned {}, retrying ({}/34) after sleep for 100 msec"
RAS = """NCCL version 2.26.2 compiled with CUDA 12.6

    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 604 on node 10.4.0.13 managing GPU 0

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 604 on node 10.4.0.13

Warnings
========

#0-1 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  Rank 12 has launched up to operation 641 -- GPU 4 managed by process 32 on node 10.13.0.124

Rank 7 trains on
"""
ENDS = (
    *(
        f"node-a:10:19 [0] proxy.cc:1458 NCCL WARN {text}"
        for text in (
            "[Service thread] Accept failed Resource temporarily unavailable",
            "[Service thread] Could not receive type from localRank 3, res=3, closed=0",
            "[Proxy Service 3] Failed to execute operation Close from rank 3, retcode 3",
        )
    ),
    f"{HEAD}misc/socket.cc:64 -> 3",
    f"{HEAD}comm 0x5f00 rank 0 nranks 1 cudaDev 0 busId 1000 - Abort COMPLETE",
)
REFUSED = "RuntimeError: NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details)"
RAY = "(Engine pid=23, ip=10.0.0.1) "
VLLM = "(VllmWorkerProcess pid=7) ERROR 01-15 02:47:32 worker.py:226] "
DUMP = (
    "[rank1]:[E307 05:29:18.1 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal"
)
EMPTY_GATHER = (
    "[rank0]: RuntimeError: DDP expects same model across all ranks, but Rank 0 has 51 params, while rank 1 has"
    " inconsistent 0 params."
)
RAS_PORT = "node-a:10:11 [0] ras/client_support.cc:1 NCCL WARN Call to bind failed: Address already in use"
DIED = (
    "(raylet) A worker died or was killed while executing a task. There are some potential root causes. (1) The process"
    " is killed by SIGKILL by OOM killer due to high memory usage. (3) The worker is crashed due to SIGSEGV."
)


def late(rank: int, sequence: int, operation: str, sizes: str, *, enqueued: int) -> str:
    """Returns PyTorch's two lines of a collective that timed out."""
    line = watchdog(rank, sequence, operation, numel=1).replace("NumelIn=1, NumelOut=1", sizes)
    status = f"failure detected by watchdog at work sequence id: {sequence} PG status: last enqueued work: {enqueued}"
    head = f"[rank{rank}]:[E227 23:07:54.3 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return f"{line}{head}  {status}, last completed work: {sequence - 1}"


def gathers(*ranks: int) -> list[str]:
    """Returns a gather that timed out, whose sizes prove that there are 4 ranks."""
    return [late(rank, 7930, "_ALLGATHER_BASE", "NumelIn=4, NumelOut=16", enqueued=7931) for rank in ranks]


def broken_watchdog(rank: int) -> str:
    """Returns the watchdog's lines where the first breaks before the work."""
    return (
        f"job.node-b [stderr] [rank{rank}]:[E909 09:55:29.3 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught"
        " collective operation timeout: \nWorkNCCL(SeqNum=2070, OpType=REDUCE, NumelIn=1, NumelOut=1,"
        " Timeout(ms)=600000) ran for 600034 milliseconds before timing out."
    )


def failed_work(rank: int) -> str:
    """Returns what the watchdog says after its first line, which filters and mails leave out."""
    head = f"[rank{rank}]:[E227 16:30:43.5 ProcessGroupNCCL.cpp:1834] [PG ID 2 PG GUID 3 Rank {rank}] "
    return f"{head}Timeout at NCCL work: 32, last enqueued NCCL work: 34, last completed NCCL work: 31."


def two_hosts(*notes: str, between: str, network: str = "IB", nics: Iterable[str] | None = None) -> list[str]:
    """Returns the log of a rank on each of two hosts."""
    more: dict[str, Any] = {} if nics is None else {"nics": tuple(nics)}
    return [SampleJob(hosts=("a", "b"), gpus=1, network=network, between=between, notes=notes, **more).text()]


def libfabric(*notes: str, between: str = "NET/AWS Libfabric/0", network: str = "AWS Libfabric") -> list[str]:
    return two_hosts(*notes, between=between, network=network, nics=())


NO_GDR = "NET/OFI Need to force simple protocol: GDR not supported"


def over(provider: str, **options: str) -> list[str]:
    """Returns a log with the plugin for libfabric over a provider without GPUDirect RDMA."""
    return libfabric(f"NET/OFI Selected {provider}, fabric is 10.0.0.0/16 (found 2 nics)", NO_GDR, **options)


def efa(message: str) -> list[str]:
    selected = "NET/OFI Selected provider is efa, fabric is efa (found 1 nics)"
    available = "DMA-BUF is available on GPU 0"
    return libfabric(selected, message, available, between="NET/Libfabric/0", network="Libfabric")


def gdr(*settings: str, note: str = "DMA-BUF is available on GPU device 0") -> list[str]:
    link = "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/1"
    return [told(text) for text in (*settings, "Using network AWS Libfabric", note, link)]


def interface(name: str) -> list[str]:
    """Returns a log of two hosts that talk through an interface."""
    return [
        told(f"NET/Socket : Using [0]{name}:10.1.0.{rank}<0>", host=f"node-{rank}")
        + told(f"comm 0x{rank} rank {rank} nRanks 2 nNodes 2 localRanks 1 localRank 0", host=f"node-{rank}")
        for rank in (0, 1)
    ]


def pairs(ends: Iterable[tuple[str, int]]) -> list[str]:
    """Returns a log of hosts, of which each has two ranks from a number on, with the network between them."""
    line = "{host}:1{rank}:2{rank} [0] NCCL INFO Channel 01 : {first}[1c0] -> {last}[1d0] [{way}] via NET/Socket/0"
    return [
        line.format(host=host, rank=rank, first=first, last=first + 1, way="send" if rank == first else "receive")
        for host, first in ends
        for rank in (first, first + 1)
    ]


LISTED = "".join(f"#  Rank  {i} Group  0 Pid   146 on    h200 device  {i} [0x5{i}] NVIDIA H200\n" for i in range(2))
LISTED += told("Channel 07/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA", host="h200", pid=146, device=1)
JOBS: dict[str, SampleJob] = {
    "the network in a host: settings": SampleJob(
        gpus=2, in_host="NET/Socket/0", settings={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    ),
    "the network in a host: no reason is known": SampleJob(in_host="NET/Socket/0"),
    "the network in a host: PCIe switches": SampleJob(in_host="NET/IB/0/GDRDMA"),
    "the network in a host: more nodes than hosts": SampleJob(in_host="NET/IB/0", num_nodes=4),
    "shared memory: P2P is disabled": SampleJob(in_host="SHM/direct/direct", settings={"NCCL_P2P_DISABLE": "1"}),
    "shared memory: a limit on P2P": SampleJob(in_host="SHM/direct", settings={"NCCL_P2P_LEVEL": "LOC"}),
    "shared memory: the driver": SampleJob(
        in_host="SHM", notes=["P2P is disabled between connected GPUs 1 and 0. You can repress"]
    ),
    "shared memory: an old version, far apart": SampleJob(in_host="direct shared memory", version="2.8.4"),
    "P2P through a third GPU": SampleJob(in_host="P2P/indirect/2[2]/read"),
    "sockets: InfiniBand is disabled": dataclasses.replace(SOCKETS, settings={"NCCL_IB_DISABLE": "1"}),
    "sockets: they are asked for": dataclasses.replace(SOCKETS, settings={"NCCL_NET": "Socket"}),
    "sockets: no device": SOCKETS,
    "sockets: a name that may match none": dataclasses.replace(SOCKETS, settings={"NCCL_IB_HCA": "mlx9"}),
    "sockets: a NIC was seen": dataclasses.replace(SOCKETS, nics=("mlx5_0:1/IB",)),
    "no GPUDirect RDMA between hosts": dataclasses.replace(HEALTHY, between="NET/IB/0"),
    "no GPUDirect RDMA: the distance": dataclasses.replace(
        HEALTHY, between="NET/IB/0", notes=["GPU Direct RDMA Disabled for GPU 1b000 / HCA 0 (distance 8 > 4)"]
    ),
    "no GPUDirect RDMA: the kernel": dataclasses.replace(
        HEALTHY, between="NET/IB/0", notes=["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"]
    ),
    "no GPUDirect RDMA: a setting": dataclasses.replace(
        HEALTHY, between="NET/IB/0", settings={"NCCL_NET_GDR_LEVEL": "LOC"}
    ),
    "no GPUDirect RDMA: a plugin": dataclasses.replace(HEALTHY, between="NET/AWS Libfabric/0", network="AWS Libfabric"),
    "a ring over sockets": SampleJob(
        notes=["Pattern 4, crossNic 0, nChannels 2, bw 9.0/9.0, type SYS/PIX, sameChannels 1"]
    ),
    "a protocol that is forced": SampleJob(settings={"NCCL_PROTO": "LL"}),
    "a setting of one rank only": dataclasses.replace(HEALTHY, rank_settings={5: {"NCCL_ALGO": "Tree"}}),
    "settings that differ": dataclasses.replace(
        HEALTHY, settings={"NCCL_IB_TIMEOUT": "18"}, rank_settings={2: {"NCCL_IB_TIMEOUT": "22"}}
    ),
    "versions that differ": dataclasses.replace(HEALTHY, rank_versions={4: "2.18.3+cuda12.1"}),
    "ranks without a log": dataclasses.replace(HEALTHY, absent=[6, 7]),
    "ranks without a log, cut at the start": dataclasses.replace(HEALTHY, absent=[6, 7], stops=0),
    "initialization that is not complete": dataclasses.replace(HEALTHY, stops=3),
}


LOGS: dict[str, list[str]] = {
    **{name: [job.mixed()] for name, job in JOBS.items()},
    "a NIC without GPUDirect RDMA, maybe on one host": [told("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'")],
    "an error while a rank connects": [
        told("misc/socket.cc:505 -> 2 (Operation now in progress)") + told("bootstrap.cc:275 -> 2")
    ],
    "an error of a socket": [told("misc/socket.cc:64 -> 2")],
    "a message of the wrong size at the proxy": [
        "a:10:19 [0] proxy.cc:1497 NCCL WARN [Service thread] Could not receive type from localRank 3, res=6"
    ],
    "an old error of PyTorch": ["RuntimeError: NCCL Error 2: unhandled system error"],
    "an error of TensorFlow": ["UnknownError: ncclCommInitRank failed: unhandled cuda error"],
    "a parameter of the kernel": ['a:7:7 [0] init.cpp:122 NCCL WARN Missing "iommu=pt" from kernel command line'],
    "a text that a terminal has quoted": ["misc/ibvwrap.cc:280 NCCL WARN Call to ibv_create_qp failed\u201c"],
    "EFA's plugin where there is no EFA": ["n:9:9 [0] ofi_init:1134 NCCL WARN NET/OFI Only EFA provider is supported"],
    "a link that is seen from one end": [
        "n:9:9 [2] src/graph/paths.cc:82 NCCL WARN Failed to find reverse path from remNode 0/2 nlinks 3"
    ],
    "a warning of NCCL before 2.3": [
        "*some host* [0] include/socket.h:185 WARN Call to connect failed : Connection refused"
    ],
    "a machine that was suspended": [watchdog(0, 5, waited_ms=25_624_887)],
    "a limit that is too short": [watchdog(3, 1, waited_ms=90).replace("=600000", "=1")],
    "ranks of one host that only nccl-tests lists": [LISTED],
    "a cut log of one rank says nothing about the others": [CUT],
    "GPUDirect RDMA disabled, without connections": [told("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'")],
    "the same of a GPU": [told("GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)")],
    "P2P disabled by a setting": [told("NCCL_P2P_DISABLE set by environment to 1.")],
    "P2P that could not be enabled": [told("Could not enable P2P between dev 0(=1b0) and dev 3(=1e0)")],
    "P2P disabled between GPUs": [told("P2P is disabled between connected GPUs 1 and 0. You can")],
    "a topology from a file": [told("NCCL_TOPO_FILE set by environment to /opt/topo.xml")],
    "a far link": [told("Pattern 4, crossNic 0, nChannels 2, bw 9.0/9.0, type PHB/PIX, sameChannels 1")],
    "an error without a word": [told("NCCL version 2.18.3"), told("graph/paths.cc:312 -> 3")],
    "libibverbs on one host is harmless": [LIBIBVERBS],
    "libibverbs between hosts is why TCP is used": [LIBIBVERBS, TCP],
    "a virtual interface among several": [
        told("Bootstrap : Using [0]ens5:10.0.0.7<0> [1]veth75:fe80::14ad%veth75<0>"),
        TCP,
    ],
    "the last error of a traceback is a warning like others": [TRACEBACK],
    "the last error within a line": [
        "RuntimeError: ... Last NCCL warning(error): 'Bootstrap : no socket interface found'"
    ],
    "a peer that is gone": [
        "h1:7:8 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h2<5>"
    ],
    "a peer that is gone only follows": [
        "h1:7:8 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h2<5>",
        TRACEBACK,
    ],
    "timeouts of unknown process groups are not compared": [watchdog(0, 90), watchdog(1, 7)],
    "timeouts of a process group are": [watchdog(rank, 5 + rank, group="PG 0") for rank in (0, 1)],
    "timeouts of two process groups are apart": [watchdog(0, 90, group="PG 0"), watchdog(1, 7, group="PG 1")],
    "all ranks of the log wait, of an unknown number": [watchdog(0, 5), watchdog(1, 5)],
    "a rank is missing below others": [watchdog(rank, 5) for rank in (1, 2, 3)],
    "one rank of an unknown number": [watchdog(5, 5)],
    "the first collective of all ranks": [watchdog(0, 1), watchdog(1, 1)],
    "the first collective of some of 16 ranks": [
        watchdog(rank, 1, "_ALLGATHER_BASE").replace("NumelOut=8", "NumelOut=128") for rank in (0, 1)
    ],
    "a gather that brought nothing is no other model": [EMPTY_GATHER],
    "the same, beside its timeout": [watchdog(0, 1), watchdog(1, 1), EMPTY_GATHER],
    "the network in a host that shares memory is by design": [
        "h:1:11 [0] NCCL INFO Channel 00/0 : 0[8000] -> 1[d000] [send] via NET/IBext/1",
        "h:2:12 [1] NCCL INFO Channel 00 : 1[d000] -> 0[8000] via SHM/direct/direct",
    ],
    "a traceback whose lines are in the wrong order": [
        "Last error:\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, invalid usage, NCCL version 2.21.5",
    ],
    "RCCL without a line of its network": [RCCL],
    "NUMA balancing": ["h:1:1 [0] init.cc:142 NCCL WARN NUMA auto balancing enabled which can lead to variability"],
    "full memory of NVLS is not the GPU that is full": [NVLS],
    "NVLS refuses the buffers of a program, and NCCL goes on": [
        SampleJob().mixed(),
        f"{HEAD[: -len('NCCL INFO ')]}transport/nvls.cc:621 NCCL WARN Cuda failure 1 'invalid argument'",
    ],
    "NVLS fails, and so does the communicator": [
        SampleJob().mixed(),
        f"{HEAD[: -len('NCCL INFO ')]}transport/nvls.cc:621 NCCL WARN Cuda failure 1 'invalid argument'",
        f"{HEAD}transport/nvls.cc:330 -> 1",
    ],
    "an exception of DeepEP has NCCL's error": [
        "RuntimeError: NCCL exception (/a/nccl.cu:105): 5 (GIN_IB_PROXY does not support specifying qp depth)"
    ],
    "the watchdog of torchcomms": [
        f"[rank{rank}] Aborting process due to timeout on rank {rank} - timeout watchdog detected operation timeout"
        for rank in (1, 2)
    ],
    "the watchdog of torchcomms after an error of NCCL": [
        "[TC] Aborting process due to error on rank 3 - timeout watchdog detected operation error.",
        "node-a:10:11 [0] misc/socket.cc:590 NCCL WARN Error: No space left on device /dev/shm/nccl-x (28)",
    ],
    "any line may follow the error": [NVLS.partition("Failed")[0], "step 7: loss 0.1"],
    "a plugin that cannot be loaded is why TCP is used": [PLUGIN],
    "no plugin": [PLUGIN.replace("version `GLIBC_2.34' not found", "cannot open shared object file")],
    "the loopback interface of an old version": [told("NET/Socket : Using [0]lo:127.0.0.1<0> [1]eth0:10.0.0.7<0>")],
    "no loopback interface": [told("NET/Socket : Using [0]eth0:10.0.0.7<0>")],
    "the last line of a thread is that it connects once more": [
        told("Using network Socket"),
        *(told(RETRY.format("Connection timed out", number), tid=99) for number in (1, 2)),
    ],
    "a connection that was tried again, and the process went on": [
        *(told(RETRY.format(error, 3), tid=99) for error in ("No route to host", "Connection refused")),
        told("Connected all rings"),
    ],
    "a connection that was refused once": [told(RETRY.format("Connection refused", 1), tid=99)],
    "a rank that did not time out": gathers(1, 2, 3),
    "a rank whose line is cut has not stayed away": [
        *gathers(1, 2, 3),
        "[rank0]:[E617 08:47:15.010 ProcessGroupNCCL.cpp:616] [Ra",
    ],
    "a rank that has started the collective is not behind": [
        late(0, 619725, "_ALLGATHER_BASE", "NumelIn=54528000, NumelOut=218112000", enqueued=619732),
        late(3, 619727, "_REDUCE_SCATTER_BASE", "NumelIn=4096, NumelOut=1024", enqueued=619730),
    ],
    "a plugin without GPUDirect where DMA-BUF is there": gdr(),
    "advice that is followed already": gdr("NCCL_NET_GDR_LEVEL set by environment to SYS"),
    "a plugin without GPUDirect where nothing is known of DMA-BUF": gdr(note="Connected all rings"),
    "only consequences": [
        "h:1:2 [0] init.cc:290 NCCL WARN Attempt to use communicator before the previous operation returned"
        " ncclSuccess",
        "h:1:2 [0] init.cc:290 NCCL WARN NET/OFI Write complete from unexpected request type!",
    ],
    "a rank that timed out itself": [f"{DUMP} due to a collective timeout from this local rank and we will try"],
    "another rank that timed out": [f"{DUMP} due to a collective timeout from rank 5"],
    "a rank that timed out itself, beside its timeout": [
        f"{DUMP} due to a collective timeout from this local rank",
        watchdog(1, 5),
    ],
    "old tests of NCCL": ["Cuda failure common.cu:891 'CUDA driver version is insufficient for CUDA runtime version'"],
    "an error of vLLM is shown without its head and the traceback": [
        f"{VLLM}Last error:\n{VLLM}Cuda failure 'out of memory', Traceback (most recent call last):"
    ],
    "an error behind the prefixes of vLLM's engine and of Ray": [
        f"{RAY}{VLLM}Last error:\n{RAY}{VLLM}Cuda failure 'out of memory'"
    ],
    "the size of a group where a gather proves it": [
        "[rank1]:[E a.cpp:1] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5,"
        " OpType=_ALLGATHER_BASE, NumelIn=10, NumelOut=160, Timeout(ms)=600000) ran for 600003"
    ],
    "a bridge of Docker": interface("docker0"),
    "a VPN": interface("tailscale0"),
    "Wi-Fi": interface("wlp2s0"),
    "a run that PyTorch ends by aborting has no errors": [SampleJob().mixed(), *ENDS],
    "a refused call": [REFUSED],
    "a refused call beside an unknown warning": [f"{REFUSED}\nLast error:\n2: NET/IB : The moon is in the wrong place"],
    "a refused call beside NICs that are merged": [f"{REFUSED}\nLast error:\nNET/IB : Requested properties for vNic 8"],
    "a prefix of Ray is no part of an error": [f"{RAY}Last error:\n{RAY}Proxy Call to rank 7 failed (Connect)"],
    "the watchdog's line may break before the work": [broken_watchdog(rank) for rank in (11, 12, 14)],
    "a socket never has GPUDirect": [f"{HEAD}NET/Socket : GPU Direct RDMA Disabled for HCA 0 'enp1s0f0'"],
    "pairs of several hosts are not put on one": pairs([("node-a", 0), ("node-b", 2)]),
    "a report of RAS": [RAS],
    "a report of RAS with memory that was never filled in": [
        RAS,
        "#2-0 (93d7000200000001) INCOMPLETE\n  Missing communicator data from 255 ranks\n"
        "  Rank 1057455228 -- GPU 0 managed by process 60004 on node 10.4.109.13",
    ],
    "a report of RAS behind what kubectl writes": [
        f"[pod/w-0/main] 2026-03-18T11:13:0{number % 10}.{7**number}Z {line}"
        for number, line in enumerate(RAS.splitlines())
    ],
    "no report of RAS, but a program's words": ["NCCL version 2.26.2", "job 7: ERROR", "job 7: The job has ended"],
    "peers that RAS gives up while ncclras -m watches": [
        f"[2026-03-18 11:13:0{second}] {event}: Process {pid} on node 10.4.0.13 managing GPU 0 "
        for second, (event, pid) in enumerate([("PEER_NEW", 603), ("PEER_DEAD", 603), ("PEER_DEAD", 604)])
    ],
    "a port of RAS is no fault of the run": [RAS_PORT],
    "another port is": [RAS_PORT.replace("ras/client_support", "misc/socket")],
    **{
        f"a missing kernel module with {method}": two_hosts(
            f"NET/{method} : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'", between=f"NET/{method}/0", network=method
        )
        for method in ("IB", "IBext_v10", "NCCL RDMA Plugin v10")
    },
    **{
        f"a NIC that is able and too far away: {how}": two_hosts(
            f"NET/IB : GPU Direct RDMA {how} for HCA 0 'rocep1s0f1", between="NET/IBext_v10/0"
        )
        for how in ("(DMABUF) enabled", "(nvidia-peermem) enabled", "Enabled")
    },
    "EFA's plugin turns GPUDirect RDMA off": efa("NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR"),
    "EFA's plugin forces a protocol": efa(NO_GDR),
    "a worker of Ray died": [BOOTSTRAP, DIED],
    "the kernel's OOM killer": [
        BOOTSTRAP,
        "[881.1] Memory cgroup out of memory: Killed process 42 (python3) total-vm:1kB",
    ],
    "the name of NCCL's result alone": ["[rank3]: RuntimeError: ncclSystemError: System call (e.g. socket) failed"],
    "what libfabric says of a request that failed": [
        "n:35:89 [5] ofi_process_cq:1039 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 21. Error: unknown",
        "libfabric:35:1668017255::efa:cq:efa_cq_handle_error():103<warn> err: 113, message: Unreachable remote (13)",
    ],
    "a driver of libibverbs that does not fit": [
        "libibverbs: Warning: Driver bnxt_re does not support the kernel ABI of 8 (supports 1 to 1) for device /sys/b",
        BOOTSTRAP,
    ],
    "libibverbs without its drivers": [
        "libibverbs: Warning: couldn't open config directory '/opt/net/etc/libibverbs.d'.",
        "libibverbs: Warning: couldn't load driver 'libvmw_pvrdma-rdmav34.so': cannot open shared object file",
        BOOTSTRAP,
    ],
    "torch without kernels for a GPU": [
        "NVIDIA RTX PRO 6000 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
        "Last error: Cuda failure 'invalid argument'",
    ],
    "torch for Windows": [
        "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv support"
    ],
    "what RCCL says without NCCL_DEBUG": [
        "RuntimeError: NCCL error: unhandled cuda error",
        "h:7:8 [0] [FATAL ERROR]: HIP failure: 'the operation cannot be performed in the present state'",
    ],
    "an error of old versions": ["NCCL: unhandled system error. Set NCCL_DEBUG=WARN for detail."],
    "an error of a plugin for inference": [
        "Assertion failed: Failed, NCCL error /a/sendPlugin.cpp:129 'invalid usage (run with"
    ],
    "an error of a communicator that is aborted": [
        "Aborting communicator: 0x7 due to async NCCL error: remote process exited or there was a"
    ],
    "an error of PaddlePaddle": [
        "OSError: (External) Nccl error, unhandled cuda error (at /a/collective_helper.cc:100)"
    ],
    "an error of PaddlePaddle, with its number": ["OSError: (External) NCCL error(2), unhandled system error."],
    "an error of TensorFlow without NCCL": [
        "nccl_utils.cc:134: NCCL operation ncclGetUniqueId(&id) failed: Unable to load NCCL library. Multi-GPU"
    ],
    "an error of JAX without NCCL": [
        "NCCL operation f(&id) failed: Unable to load NCCL library. Last NCCL warning(error) log entry (may be"
        " unrelated) 'Unable to load NCCL library.'.; current tracing scope: all-reduce.1"
    ],
    "an error of JAX, with NCCL's last warning": [
        "NCCL operation ncclCommInitRank(&comm) failed: unhandled cuda error. Last NCCL warning(error) log entry (may"
        " be unrelated) 'Cuda failure 2 'out of memory''."
    ],
    "an error of PyTorch's store": [
        "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0',"
        " but store->get('0') got error: Socket Timeout"
    ],
    "an error of a barrier": ["RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 30000 ms"],
    "a warning of PPU's NCCL, of which PyTorch has only the place": [
        "node-a:10:11 [0] NCCL ERROR Bootstrap : no socket interface found",
        "[rank0]: NCCL error in: NCCLUtils.cpp:94, internal error - please report this issue, NCCL version 2.21.5",
        "[rank0]: ncclInternalError: Internal check failed.\n[rank0]: Last error:\n[rank0]: init.cc:411 -> 3",
    ],
    "errors of CUDA that the program raises": [
        "[rank3]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "[rank4]: RuntimeError: CUDA error: operation failed due to a previous error",
    ],
    "an error of CUDA that ends the watchdog of an old torch": ["  what():  CUDA error: unknown error", BOOTSTRAP],
    "an access to another GPU's memory, as XLA says it": [
        "E0802 13:07:11.1 1 a.cc:29] INTERNAL: CUDA_ERROR_CONTAINED: Invalid access of peer GPU memory over nvlink",
        BOOTSTRAP,
    ],
    "a fault of NVSwitch": ["nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 22013, Fatal, Link 27 DLREQ", BOOTSTRAP],
    "no process was killed": [
        *TIMEOUTS,
        *('  "OOMKilled": false,', "low 0 high 0 max 0 oom 0 oom_kill 0", "oom_kill_disable=False"),
        "W1130 10:00:00.1 autotune.py:7] skipping config 3: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
    "what torchfrtrace found": [
        "Not all ranks joining collective, sequence number: 12\ninternal record id: 14\nmissing ranks: {3}"
    ],
    "a timeout, and SLURM: out of memory": [*TIMEOUTS, "slurmstepd: error: Detected 2 oom_kill events in StepId=7.0."],
    "a timeout, and mpirun: killed": [
        *TIMEOUTS,
        "mpirun: process rank 3 with PID 0 on node b exited on signal 9 (Killed).",
    ],
    "a timeout, and torchrun: crashed": [
        *TIMEOUTS,
        "torch.distributed.elastic: failed (exitcode: -11) local_rank: 0 (pid: 9)",
    ],
    "a timeout, and the driver: a GPU is lost": [
        *TIMEOUTS,
        "[ 99.1] NVRM: Xid (PCI:0000:4a:00): 79, GPU has fallen off the bus.",
    ],
    "a timeout, and PyTorch: a GPU's memory is full": [
        *TIMEOUTS,
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
    ],
    "a timeout, and XLA: a rendezvous": [
        *TIMEOUTS,
        "waiting for `Acquire clique: devices=4` for 10 seconds and may be stuck.",
    ],
    "a timeout, and what a launcher ends: exitcode : -6 (pid: 9)": [*TIMEOUTS, "exitcode : -6 (pid: 9)"],
    "a timeout, and what a launcher ends: Signal 15 (SIGTERM) received by PID 7": [
        *TIMEOUTS,
        "Signal 15 (SIGTERM) received by PID 7",
    ],
    "a timeout, and what a launcher ends: exitcode : 1": [*TIMEOUTS, "exitcode : 1"],
    "Kubernetes' OOM": [BOOTSTRAP, "      Reason:       OOMKilled"],
    "a store that is gone": [
        BOOTSTRAP,
        '[rank1]:[W1 a.cpp:1783] Failed to check the "should dump" flag on TCPStore, (maybe',
    ],
    "a store that is gone, in other words": [
        BOOTSTRAP,
        "[rank1]:[W1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=9): Connection was",
    ],
    "work that failed without the line that says why": [failed_work(rank) for rank in (3, 5)],
    "work that failed, and why": [*(failed_work(rank) for rank in (3, 5)), watchdog(3, 32)],
    "work that failed beside a warning": [
        *(failed_work(rank) for rank in (3, 5)),
        "a:1:2 [0] net.cc:1 NCCL WARN Cuda failure 2 'out of memory'",
    ],
    **{
        f"a plugin for libfabric over TCP: {provider}": over(provider)
        for provider in ("provider is tcp", "Provider is tcp;ofi_rxm", "Provider is sockets")
    },
    "a fast provider without GPUDirect RDMA": over("provider is cxi"),
    "NCCL's own sockets beside the plugin": over("provider is tcp", between="NET/Socket/0", network="Socket"),
}


def test_findings(golden: Callable[[str, str], None]) -> None:
    """If it fails, a log is blamed for another thing, with another certainty, or an advice leads elsewhere."""
    said, first = list[str](), dict[tuple[str, str], str]()
    for name, texts in LOGS.items():
        said.append(name)
        lines = "\n".join(text.removesuffix("\n") for text in texts).split("\n")
        for found in find_all(read(*texts)):
            assert all(line.text in lines[line.number - 1] for line in found.evidence), found.code
            said.append(f"  {found.severity}, {found.confidence}: {found.code}: {found.what}")
            is_new = (found.why, found.advice) not in first
            earlier = first.setdefault((found.why, found.advice), name)
            said += [f"    {found.why}", f"    {found.advice}"] if is_new else [f'    as in "{earlier}"']
    golden("findings", "\n".join(said))


def _causes() -> list[list[str]]:
    lines = (Path(__file__).parent / "warning_causes.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines[1:]]


@pytest.mark.parametrize(("code", "severity", "place", "text"), _causes())
def test_a_text_has_its_cause(code: str, severity: str, place: str, text: str) -> None:
    """If it fails, a user looks for a cable where the NIC itself failed, or refused an access."""
    entry = explain(text, place)
    assert entry is not None
    assert (entry.code, entry.severity) == (code, severity)


def test_each_reason_has_a_text() -> None:
    """If it fails, a finding has no text, or a text no finding."""
    texts = read_texts(Path(nccl_log.__file__).with_name("findings.txt"))
    sources = "".join(path.read_text() for path in Path(nccl_log.__file__).parent.glob("*.py"))
    assert all(text.keys() - {"what", "is"} == {"why", "try"} for text in texts.values())
    assert set(re.findall(r'\breason\("(\w+)"', sources)) <= texts.keys()
    without_what = re.findall(r'\bfinding\("\w+", "(\w+)"(?![^\n]*what=)', sources)
    assert [code for code in without_what if "what" not in texts[code]] == []
    assert [code for code in texts if not code.startswith("ras_") and f'"{code}"' not in sources] == []


def test_each_pattern_is_used() -> None:
    """If it fails, a pattern was renamed in one of the two places, or is left over."""
    table = read_texts(Path(nccl_log.__file__).with_name("patterns.txt"))
    sources = "".join(
        Path(nccl_log.__file__).with_name(name).read_text() for name in ("messages.py", "reader.py", "torch_lines.py")
    )
    used = re.findall(r'\b_?(PROCESS|RANK|PATTERNS)\["(\w+)"\]', sources)
    sections = {"PROCESS": "process", "RANK": "rank", "PATTERNS": "other"}
    assert {(sections[of], name) for of, name in used} == {(of, name) for of in sections.values() for name in table[of]}
