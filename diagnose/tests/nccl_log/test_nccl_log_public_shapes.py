"""Logs as people post them: old, cut, of one rank, without heads; written here after the shapes of public ones."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import versions_of
from commopt_diagnose.nccl_log.warnings import explain
from diagnose_support.nccl_sample_logs import HEALTHY, SampleJob, findings, read, told, watchdog
from support.commopt import commopt, refusal


def old_rank(host: str, tid: int, rank: int, *, is_connected: bool = True) -> str:
    """Returns the lines of a thread that sets up a communicator of two hosts, as before NCCL 2.16."""
    ring = ["Channel 00/01 :    0    1"] if rank == 0 else []
    link = [f"Channel 00 : {1 - rank}[1a000] -> {rank}[1a000] [receive] via NET/IB/0/GDRDMA"] if is_connected else []
    trees = f"Trees [0] {-1 if rank else 1}/-1/-1->{rank}->{rank - 1}"
    done = f"comm 0x100{tid} rank {rank} nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE"
    lines = ["Setting affinity for GPU 0 to ff", *ring, trees, *link, done]
    return "".join(told(line, host=host, pid=100, tid=tid) for line in lines)


def test_a_new_thread_behind_the_end_of_initialization_is_a_new_communicator() -> None:
    """Two hosts with a world of 2 ranks, and then 2 groups of 2 ranks in another order: nothing is mixed up."""
    hosts = ("node-a", 0), ("node-b", 1)
    text = "".join(old_rank(host, 101, index) + old_rank(host, 102, 1 - index) for host, index in hosts)
    log = read(text)
    (pool,) = log.communicators
    assert (pool.count, pool.num_ranks, len(pool.unknown), pool.members) == (2, 2, 4, {})
    assert {"network_in_host", "different_channels", "shared_memory"}.isdisjoint(findings(text))


def test_ranks_that_are_always_the_same_gpu_are_told_apart_by_their_order() -> None:
    hosts = ("node-a", 0), ("node-b", 1)
    log = read(*(old_rank(host, tid, index) for host, index in hosts for tid in (101, 102)))
    assert [(each.count, sorted(each.members), each.num_nodes) for each in log.communicators] == [(1, [0, 1], 2)] * 2
    assert find_all(log) == []


def test_lines_of_another_thread_go_to_the_one_communicator_that_fits() -> None:
    rank = old_rank("node-a", 101, 0, is_connected=False)
    late = told("Channel 00 : 0[1a000] -> 1[2b000] via P2P/IPC", host="node-a", pid=100, tid=190)
    (communicator,) = read(rank + late).communicators
    assert len(communicator.connections) == 1
    foreign = late.replace("0[1a000]", "0[99000]")  # a bus id of another GPU
    assert [len(each.connections) for each in read(rank + foreign).communicators] == [0, 1]


@pytest.mark.parametrize("num_ranks", [8, 40])
def test_a_ring_has_all_ranks_or_the_first_twenty(num_ranks: int) -> None:
    shown = "".join(f"{rank:4d}" for rank in range(min(num_ranks, 20)))
    lines = [f"n:1:2 [0] NCCL INFO Channel 0{channel}/02 :{shown}\n" for channel in (0, 1)]
    (communicator,) = read("".join(lines)).communicators
    assert communicator.num_ranks == (8 if num_ranks == 8 else None)
    assert read(lines[0]).communicators[0].num_ranks is None  # one line may be cut
    assert communicator.min_ranks == min(num_ranks, 20)
    damaged = "n:1:2 [0] NCCL INFO Channel 00/02 :   0   1   1   3\n"
    assert read(damaged).communicators == []


CUT = """\
h1:7:9 [1] NCCL INFO NET/IB : No device found.
h1:7:9 [1] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.3<0>
h1:7:9 [1] NCCL INFO Using network Socket
h1:7:9 [1] NCCL INFO ncclCommInitRank comm 0xb9 rank 1 nranks 16 cudaDev 1 nvmlDev 1 busId 7e0 commId 0x89 - Init START
h1:7:9 [1] NCCL INFO Setting affinity for GPU 1 to ffff
"""


def test_a_cut_log_of_one_rank_says_nothing_about_the_others() -> None:
    found = findings(CUT)
    assert {finding.severity for finding in found.values()} == {"note"}
    assert found["missing_ranks"].what == "the log has rank 1 of 16, and no line names ranks 0, 2-15"
    assert "is unknown" in found["missing_ranks"].why
    assert "at the bootstrap, which finds GPUs and NICs" in found["unfinished_init"].why
    assert "or the log is cut" in found["unfinished_init"].why
    assert found["socket_network"].what.startswith("if there are several hosts, they talk over TCP")
    assert found["unknown"].what.startswith("unknown: how rank 1 talks")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (told("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"), "no_gdr", "for mlx5_0"),
        (told("GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)"), "no_gdr", "GPU ca000 / HCA 0"),
        (told("NCCL_P2P_DISABLE set by environment to 1."), "shared_memory", "without P2P"),
        (told("Could not enable P2P between dev 0(=1b0) and dev 3(=1e0)"), "shared_memory", "without P2P"),
        (told("P2P is disabled between connected GPUs 1 and 0. You can"), "shared_memory", "without P2P"),
        (told("NCCL_TOPO_FILE set by environment to /opt/topo.xml"), "topology_file", "/opt/topo.xml"),
        (told("Pattern 4, crossNic 0, nChannels 2, bw 9.0/9.0, type PHB/PIX, sameChannels 1"), "far_link", "PHB link"),
        (told("NCCL version 2.18.3") + told("graph/paths.cc:312 -> 3"), "silent_error", "graph/paths.cc:312"),
    ],
)
def test_findings_need_no_connections(text: str, code: str, words: str) -> None:
    found = findings(text)
    assert words in found[code].what
    assert "unknown" in found


def test_a_far_nic_matters_between_hosts_only() -> None:
    search = ["Pattern 4, crossNic 0, nChannels 2, bw 9.0/9.0, type NVL/PHB, sameChannels 1"]
    assert "far_nic" in findings(SampleJob(hosts=("a", "b"), gpus=1, notes=search, between="NET/IB/0").mixed())
    assert "far_nic" not in findings(SampleJob(hosts=("a", "b"), gpus=1, notes=search).mixed()), "GPUDirect RDMA works"
    assert "far_nic" not in findings(SampleJob(notes=search).mixed())
    assert "far_nic" in findings(told("Pattern 3, crossNic 0, nChannels 1, bw 24.0/12.0, type LOC/PHB, sameChannels 1"))


def test_nvlink_in_one_direction() -> None:
    """GPU 1C has no line for its link to 1B, and one to 1A that 1A has not."""
    links = {"1A": ["1B"], "1B": ["1A", "1C"], "1C": ["1A"]}
    text = ""
    for gpu, others in links.items():
        text += told(f"GPU/{gpu}000 (0)") + "".join(told(f"     + NVL[40.0] - GPU/{each}000") for each in others)
    found = findings(text)["one_way_nvlink"]
    assert found.what.endswith("in one direction only: 1B000 > 1C000, 1C000 > 1A000 (bus ids)")
    assert "one_way_nvlink" not in findings(text.partition(told("GPU/1C000 (0)"))[0])  # cut: its links are not known


LIBIBVERBS = "a:7:8 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\n"


def test_libibverbs_is_harmless_on_one_host_and_the_reason_for_tcp_between_hosts() -> None:
    alone = findings(LIBIBVERBS)
    assert alone["no_ibverbs"].severity == "note"
    assert "harmless on one host" in alone["no_ibverbs"].why
    tcp = told("Channel 00 : 1[1e0] -> 0[1e0] [receive] via NET/Socket/0")
    assert findings(LIBIBVERBS + tcp)["socket_network"].why.startswith("libibverbs cannot be loaded")


def test_a_virtual_interface_among_several() -> None:
    tcp = told("Channel 00 : 1[1e0] -> 0[1e0] [receive] via NET/Socket/0")
    text = told("Bootstrap : Using [0]ens5:10.0.0.7<0> [1]veth75:fe80::14ad%veth75<0>") + tcp
    found = findings(text)["virtual_interface"]
    assert "the interface veth75 (fe80::14ad%veth75)" in found.what
    assert found.advice == "set NCCL_SOCKET_IFNAME to ens5"


TRACEBACK = """\
[rank3]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, invalid usage, NCCL version 2.19.3
[rank3]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank3]: Last error:
[rank3]: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000
"""


def test_the_last_error_of_a_traceback_is_a_warning_like_others() -> None:
    found = findings(TRACEBACK)
    assert found["same_gpu"].what == "rank 3 warns: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000"
    inline = findings("RuntimeError: ... Last NCCL warning(error): 'Bootstrap : no socket interface found'\n")
    assert "no_interface" in inline
    assert versions_of(read(TRACEBACK)) == ["2.19.3"]


SHM = "Error while attaching to shared memory segment /dev/shm/nccl-x (size {}), error: No such file or directory (2)"


@pytest.mark.parametrize(
    ("place", "text", "code"),
    [
        ("misc/shmutils.cc:88", "Error: failed to extend /dev/shm/nccl-W to 9 bytes: No space left on device (28)",
         "shared_memory_full"),
        ("include/shm.h:28", "Call to posix_fallocate failed : No space left on device", "shared_memory_full"),
        ("misc/shmutils.cc:129", SHM.format(9637888), "shared_memory_apart"),
        ("misc/shmutils.cc:129", SHM.format(0), "shared_memory_lost"),
        ("include/shm.h:27", "Call to shm_open failed : Permission denied", "shared_memory_denied"),
        ("transport/shm.cc:590", "Cuda failure 217 'peer access is not supported'", "shared_memory_refused"),
        ("transport/p2p.cc:238", "Cuda failure 217 'peer access is not supported'", "no_peer_access"),
        ("transport/nvls.cc:598", "Cuda failure 1 'invalid argument'", "nvls"),
        ("include/alloc.h:39", "Cuda failure 1 'invalid argument'", "cuda_failure"),
        ("misc/argcheck.cc:39", "Recv : invalid root 7 (root should be in the 0..0 range)", "wrong_call"),
        ("nccl_net_ofi.cpp:969", "NET/OFI Creating new endpoint for domain 0x7f failed: Invalid argument", "ofi_setup"),
        ("transport/net_ib.cc:148", "NET/IB : Unable to open device mlx5_bond_0", "ib_open"),
        ("misc/ibvwrap.cc:262", "Call to ibv_modify_qp failed with 110 Connection timed out", "ib_unreachable"),
        ("transport/net_ib.cc:1", "NET/IB : req 0/1 tag 0 peer 10.0.0.2<5> collective mismatch error, local size 4",
         "mismatched_collective"),
        ("transport.cc:30", "No transport found for rank 1[b000] -> rank 0[a000]", "no_transport"),
        ("enqueue.cc:58", "Cuda failure 'named symbol not found'", "wrong_build"),
        ("enqueue.cc:58", "Cuda failure 209 'no kernel image is available for execution on the device'", "wrong_build"),
        ("enqueue.cc:58", "hipIpcGetMemHandle failed : invalid argument", "no_peer_access"),
        ("net_ib.cc:9", "NET/IB : Got async event : local catastrophic error", "ib_device"),
        ("net_ib.cc:9", "NET/IB : mlx5_0:1 async fatal event: local catastrophic error", "ib_device"),
        ("net_ib.cc:9", "NET/IB : mlx5_0:1 Got async event : local access violation work queue error", "ib_queue"),
        ("net_ib.cc:9", "NET/IB : mlx5_1:1 async fatal event on QP (0x7f00): invalid request local work queue error",
         "ib_queue"),
        ("net_ib.cc:9", "NET/IB : Got async event : CQ error", "ib_queue"),
        ("net_ib.cc:9", "NET/IB : Got async event : port error", "ib_link"),
        ("net_ib.cc:9", "NET/IB : mlx5_1:1 Got non-fatal async event: GID table change(18)", "ib_event"),
        ("", "connecting to address  with family 5 is neither AF_INET(2) nor AF_INET6(10)", "no_address"),
    ],
)  # fmt: skip
def test_one_text_one_cause(place: str, text: str, code: str) -> None:
    """If it fails, a user looks for a cable where the NIC itself failed, or refused an access."""
    entry = explain(text, place)
    assert entry is not None
    assert entry.code == code


def test_what_only_follows_is_a_note() -> None:
    closed = "h1:7:8 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer h2<5>\n"
    alone, both = findings(closed), findings(closed + TRACEBACK)
    assert (alone["peer_gone"].severity, both["peer_gone"].severity) == ("error", "note")


def test_timeouts_of_several_process_groups_are_not_compared() -> None:
    mixed = findings(watchdog(0, 90) + watchdog(1, 7))["collective_timeout"]
    assert "different process groups" in mixed.why
    named = find_all(read("".join(watchdog(rank, 5 + rank, group="PG 0") for rank in (0, 1))))
    assert "rank 0 is the furthest behind" in named[0].why
    apart = find_all(read(watchdog(0, 90, group="PG 0") + watchdog(1, 7, group="PG 1")))
    assert [each.what.partition(" in PG ")[2][:1] for each in apart] == ["0", "1"]


def test_the_world_size_is_unknown_without_a_communicator() -> None:
    some = findings(watchdog(0, 5) + watchdog(1, 5))["collective_timeout"]
    assert some.why.startswith(
        "all ranks of this log (ranks 0, 1) wait in the same collective; whether there are other"
    )
    gap = findings("".join(watchdog(rank, 5) for rank in (1, 2, 3)))["collective_timeout"]
    assert gap.why.startswith("rank 0 did not time out")
    one = findings(watchdog(5, 5))["collective_timeout"]
    assert "did not time out" not in one.why


def test_a_line_of_the_watchdog_that_a_terminal_broke() -> None:
    broken = watchdog(2, 4).replace("OpType", "OpTy\npe")
    (timeout,) = read(broken).timeouts.values()
    assert (timeout.rank, timeout.sequence, timeout.operation, timeout.limit_s) == (2, 4, "ALLREDUCE", 600.0)


def test_the_network_within_a_host_that_shares_memory_is_by_design() -> None:
    """Other pairs of the host copy through shared memory, so containers cannot be the reason."""
    text = "h:1:11 [0] NCCL INFO Channel 00/0 : 0[8000] -> 1[d000] [send] via NET/IBext/1\n"
    text += "h:2:12 [1] NCCL INFO Channel 00 : 1[d000] -> 0[8000] via SHM/direct/direct\n"
    found = findings(text)["network_in_host"]
    assert (found.severity, "prefers the NIC" in found.why, "--ipc=host" in found.advice) == ("note", True, False)


def test_a_terminal_s_window_around_lines() -> None:
    framed = "│ h:1:11 [0] NCCL INFO Channel 00 : 4[cb000] -> 0[92000] [send] via NET/IB/2        │\n"
    (communicator,) = read(framed).communicators
    assert [each.path for each in communicator.connections] == ["NET/IB"]


def test_logs_without_heads_of_two_ranks_in_one_file() -> None:
    ranks = [
        f"NCCL INFO Bootstrap : Using lo:127.0.0.1<0>\nNCCL INFO Trees [0] -1/-1/-1->{rank}->{1 - rank}\n"
        f"NCCL INFO Channel 00 : {rank}[{rank}9000] -> {1 - rank}[{1 - rank}9000] via direct shared memory\n"
        f"NCCL INFO comm 0x7f{rank} rank {rank} nranks 2 cudaDev 0 busId {rank}9000 - Init COMPLETE\n"
        for rank in (1, 0)
    ]
    (communicator,) = read("".join(ranks)).communicators
    assert sorted(communicator.members) == [0, 1]
    assert "virtual_interface" not in findings("".join(ranks))


def test_versions_before_the_name_stood_in_front() -> None:
    text = "gpu:18:18 [0] INFO NET : Using interface enp3:10.0.0.3<0>\nNCCL version 2.2.13+cuda9.0\n"
    text += "gpu:18:19 [0] INFO comm 0x7f rank 0 nranks 2\n"
    text += "gpu:18:20 [0] include/socket.h:360 WARN Call to connect failed : Connection timed out\n"
    assert read(text).communicators[0].num_ranks == 2
    assert "unreachable" in findings(text)
    assert read("06:16:47 INFO nothing of NCCL's\n").num_lines == 0


@pytest.mark.parametrize("encoding", ["gzip", "utf-16", "utf-16-le", "stdin"])
def test_compressed_utf16_and_standard_input(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "log", HEALTHY.mixed()
    if encoding == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    elif encoding == "stdin":
        path = Path("-")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    else:
        path.write_bytes(text.encode(encoding))
    assert [len(each.members) for each in read_log([path]).communicators] == [8]


@pytest.mark.parametrize("fault", ["cut", "damaged", "checksum"])
def test_a_compressed_log_is_read_up_to_where_it_is_cut_or_damaged(fault: str, tmp_path: Path) -> None:
    """Such as one that was copied while the job was writing it."""
    path, whole = (
        tmp_path / "log.gz",
        bytearray(gzip.compress("".join(HEALTHY.mixed(seed) for seed in range(9)).encode())),
    )
    middle = len(whole) // 2
    if fault == "cut":
        del whole[middle:]
    else:
        begin = -8 if fault == "checksum" else middle
        whole[begin : begin + 4] = b"\xff" * 4
    path.write_bytes(whole)
    output = commopt("nccl-log", path, columns=300).output
    assert f"warning: {path} is cut or damaged, and was read up to there" in output
    assert "communicator 1: 8 ranks, 2 hosts" in output
    path.write_bytes(whole[:30])
    assert refusal("nccl-log", path) == f"commopt: {path}: no line of NCCL before {path} is cut or damaged"


def test_two_jobs_in_one_call_are_two_communicators(tmp_path: Path) -> None:
    """Without ids, each file that is complete by itself is a job."""
    for name in ("one", "two"):
        job = SampleJob(hosts=(name,), gpus=2, version="2.8.4+cuda11.0")
        (tmp_path / name).write_text(job.text())
    log = read_log(sorted(tmp_path.iterdir()))
    assert [(sorted(each.members), [m.host for m in each.machines]) for each in log.communicators] == [
        ([0, 1], ["one"]),
        ([0, 1], ["two"]),
    ]


def test_a_long_table_says_what_it_leaves_out(tmp_path: Path) -> None:
    lines = "".join(told(f"AllReduce: {1 << size} Bytes -> Algo RING proto LL time 5.0") for size in range(1, 20))
    (tmp_path / "log").write_text(lines)
    assert "and 7 more: see --json" in commopt("nccl-log", tmp_path / "log").output


def test_manifest_of_public_threads() -> None:
    rows = [row.split("\t") for row in (Path(__file__).parent / "public_threads.tsv").read_text().splitlines()]
    assert all(len(row) == 2 and row[1] for row in rows)
    assert len({row[0] for row in rows}) == len(rows) > 60


def test_json_of_a_pool(tmp_path: Path) -> None:
    hosts = ("a", 0), ("b", 1)
    text = "".join(old_rank(host, 101, index) + old_rank(host, 102, 1 - index) for host, index in hosts)
    (tmp_path / "log").write_text(text)
    (pool,) = json.loads(commopt("nccl-log", tmp_path / "log", "--json").output)["communicators"]
    assert (pool["num_communicators"], pool["num_ranks"], pool["ranks"]) == (2, 2, [])


def test_a_connection_that_another_process_wrote_into_is_none() -> None:
    """Else a single broken line is a slow connection."""
    head = "a:1:2 [0] NCCL INFO Channel 0{}/0 : 0[0] -> 1[0] [send] via NET/IB/6"
    ends = ("/GDRDMA", "/GDSetting up the model", "/GDRDMA/Shared", "/GDRDMA(PCI)")
    connections = read("".join(f"{head.format(i)}{end}\n" for i, end in enumerate(ends))).communicators[0].connections
    assert [(each.channel, each.has_gdr) for each in connections] == [(0, True), (2, True), (3, True)]


def test_a_line_without_a_head_is_of_the_process_that_has_its_communicator() -> None:
    """Not of the one that wrote last, on another host."""
    begun = "{}:{}:9 [0] NCCL INFO comm 0x{} rank {} nranks 2 cudaDev 0 busId 1a000 commId 0x77 - Init START\n"
    text = begun.format("a", 7, "aa", 0) + begun.format("b", 8, "bb", 1)
    text += "0] NCCL INFO comm 0xaa rank 0 nranks 2 cudaDev 0 busId 1a000 commId 0x77 - Init COMPLETE\n".replace(
        "0]", "[0]", 1
    )
    (communicator,) = read(text).communicators
    assert {rank: member.process.host for rank, member in communicator.members.items()} == {0: "a", 1: "b"}
    assert communicator.members[0].finished
    assert not communicator.unknown


def test_a_traceback_whose_lines_are_in_the_wrong_order() -> None:
    """The name of NCCL's result is no last error."""
    text = "Last error:\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    text += "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, invalid usage, NCCL version 2.21.5\n"
    assert [each.severity for each in findings(text).values()] == ["error"]
