"""Which ranks are in a communicator, in logs of any version, whole or cut."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import extras_of, paths_of, to_plain, versions_of
from diagnose_support.nccl_sample_logs import HEALTHY, SampleJob, findings, read, shown, told

VERSIONS = ["2.4.8", "2.5.7", "2.8.4", "2.9.9", "2.14.3", "2.16.5", "2.18.5", "2.21.5", "2.24.3", "2.27.7", "2.30.7"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read_alike(version: str) -> None:
    log = read(dataclasses.replace(HEALTHY, version=f"{version}+cuda12.4").mixed())
    (communicator,) = log.communicators
    assert (communicator.num_ranks, len(communicator.machines), communicator.missing) == (8, 2, [])
    paths = {(path.name, path.place): path.pairs for path in paths_of(communicator)}
    assert paths["P2P/CUMEM/read", "in a host"] == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    assert paths["NET/IB/GDRDMA", "between hosts"] == [(3, 4), (7, 0)]
    assert extras_of(communicator)["GPUDirect RDMA"] == "8 of 8 connections"
    assert versions_of(log) == [f"{version}+cuda12.4"]
    assert find_all(log) == []


def test_lost_beginning() -> None:
    """Ranks are known from their connections and trees, where the log begins behind ``Init START``."""
    lines = HEALTHY.mixed().splitlines()
    kept = [line for line in lines if " via " in line or "Trees" in line]
    (communicator,) = read("\n".join(kept)).communicators
    assert sorted(communicator.members) == list(range(8))
    assert find_all(read("\n".join(kept))) == []


def test_several_communicators() -> None:
    """A split communicator has its own ranks; lines of a thread belong to the communicator that it last named."""
    split = []
    for rank in range(4):
        head = f"node-a:{4000 + 10 * rank}:{4005 + 10 * rank} [{rank}] NCCL INFO "
        named = (
            f"ncclCommSplit comm 0x77{rank} rank {rank // 2} nranks 2 cudaDev {rank} nvmlDev {rank} busId b000"
            f" parent 0x55d0{rank:04x} splitCount 1 color {rank % 2} key {rank}"
        )
        split.append(f"{head}{named} - Init START")
        if rank < 2:
            split.append(f"{head}Channel 00/0 : 0[{rank}] -> 1[{rank + 2}] via SHM/direct/direct")
        split.append(f"{head}{named} - Init COMPLETE")
    log = read(SampleJob().mixed() + "\n".join(split))
    assert [(each.num_ranks, sorted(each.members)) for each in log.communicators] == [
        (4, [0, 1, 2, 3]),
        (2, [0, 1]),
        (2, [0, 1]),
    ]
    assert [len(paths_of(each)) for each in log.communicators] == [1, 1, 1]
    assert [finding.code for finding in find_all(log)] == ["shared_memory"]  # once for both


def test_plain_is_complete() -> None:
    log = read(HEALTHY.mixed())
    plain = to_plain(log, find_all(log))
    (communicator,) = plain["communicators"]
    assert communicator["num_ranks"] == 8
    assert communicator["networks"] == ["IB"]
    assert communicator["rings"] == [{"ranks": tuple(range(8)), "channels": [0, 1]}]
    assert len(communicator["ranks"][3]["connections"]) == 2
    assert plain["processes"][0]["nics"] == ["mlx5_0:1/IB"]


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


def test_a_cut_id_makes_no_other_communicator() -> None:
    start = "ncclCommInitRank comm 0x5f0{rank} rank {rank} nranks 3 cudaDev {rank} busId {rank}0 commId 0x996ee6f117cb"
    lines = [f"n:1{rank}:2{rank} [{rank}] NCCL INFO {start.format(rank=rank)}8e1e - Init START" for rank in (0, 1)]
    lines.append(f"n:12:22 [2] NCCL INFO {start.format(rank=2)}")
    (communicator,) = read("\n".join(lines)).communicators
    assert list(communicator.members) == [0, 1, 2]


def test_rccl_names_the_number_of_ranks_in_each_line() -> None:
    line = "Channel 00/0 : 16[17000] -> 18[21000] via P2P/IPC comm 0x5609 nRanks 32"
    warn = "node-a:10:11 [0] src/init.cc:20 NCCL WARN MSCCL++: Cannot enable MSCCL++\n"
    text = told("RCCL version : 2.22.3-HEAD:271856d") + told(line) + warn
    log = read(text)
    assert (versions_of(log), log.communicators[0].num_ranks) == (["2.22.3 (RCCL)"], 32)
    assert findings(text)["mscclpp"].severity == "note"


def test_lines_that_name_no_communicator_belong_to_the_one_that_lacks_their_rank() -> None:
    """Threads of one process, of which a cut log has the name of the communicator only for some."""
    name = "n:9:1{rank} [{rank}] NCCL INFO comm 0x5f0{rank} rank {rank} nRanks 4 nNodes 1 localRanks 4 localRank 0\n"
    tree = "n:9:1{rank} [{device}] NCCL INFO Trees [0] -1/-1/-1->{rank}->0\n"
    named = "".join(name.format(rank=rank) for rank in (0, 2))
    (communicator,) = read(named + "".join(tree.format(rank=rank, device=rank) for rank in (1, 3))).communicators
    assert communicator.is_complete
    # Another rank on a GPU that has one already is in another communicator.
    assert len(read(named + "".join(tree.format(rank=rank, device=2) for rank in (1, 3))).communicators) > 1


def test_one_cut_line_of_a_ring_is_no_communicator_of_one_rank() -> None:
    ring = told("Channel 00/02 :    0")
    assert (read(ring).communicators[0].num_ranks, "ring on" in shown(ring)) == (None, False)


def test_channels_are_counted_where_their_number_is_not_printed() -> None:
    assert ", 2 channels" in shown(told("Channel 01 : 0[1a] -> 1[1b] via P2P/IPC"))


def test_nvls_is_unused_only_where_the_number_of_its_channels_is_known() -> None:
    begin = told("comm 0x5f rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0")
    begin += told("NVLS multicast support is available on dev 0")
    assert extras_of(read(begin).communicators[0])["NVLS"] == "available"
    rest = told("16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels")
    assert extras_of(read(begin + rest).communicators[0])["NVLS"] == "available, not used"


def test_processes_without_a_communicator_are_shown() -> None:
    text = "#  Rank  0 Group  0 Pid     10 on node-a device  0 [0x07] A100\n" + "".join(
        f"{host}:10:11 [0] NCCL INFO {message}\n"
        for host in ("node-a", "node-b")
        for message in ("NET/IB: [0] mlx5_3:1/IB", "NCCL_IB_DISABLE set by environment to 1.")
    )
    found = findings(text)
    assert "1 on node-a, 1 on node-b, NICs mlx5_3:1/IB\nnccl-tests lists 1 rank on node-a" in shown(text)
    assert found["socket_network"].severity == "slow"
    assert found["socket_network"].what == "hosts talk over TCP (network Socket)"
    assert "socket_network" not in findings(text.replace("node-b", "node-a"))
    assert "1 on node-a" in shown(told("NET/OFI Initializing aws-ofi-nccl 1.9.1-aws", host="node-a"))


def _initialized(comm: str, comm_id: str, tid: int = 8) -> str:
    middle = f"ncclCommInitRank comm {comm} rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId {comm_id} - Init"
    return told(f"{middle} START", tid=tid) + told(f"{middle} COMPLETE", tid=tid)


def test_communicators_of_a_process_have_the_connections_of_their_own_lines() -> None:
    """Equal lines are kept once, but the same ranks may be other GPUs in another communicator."""
    log = read(
        _initialized("0x1", "0xa"),
        told("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"),
        _initialized("0x2", "0xb", tid=9),
        told("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", tid=9),
        told("Channel 01/0 : 0[0] -> 1[4] via P2P/IPC", tid=9),
    )
    first, second = log.communicators
    assert [connection.labels for connection in first.connections] == [("0", "1")]
    assert [connection.labels for connection in second.connections] == [("0", "1"), ("0", "4")]
    assert first.connections[0] is second.connections[0]


SHM = told("Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct")


def test_a_path_whose_name_is_cut_is_no_path() -> None:
    kinds = [
        each.path for each in read(SHM, told("Channel 01 : 0[0] -> 1[1] via P2P/CUM")).communicators[0].connections
    ]
    assert kinds == ["SHM/direct/direct"]


def test_lines_of_a_rank_without_a_name_are_of_the_only_communicator() -> None:
    channels = [told("24 coll channels, 0 nvls channels, 32 p2p channels", host=host) for host in ("a", "b")]
    end = told("comm 0x7f rank 0 nranks 2 cudaDev 0 busId 8000 commId 0x9e - Init COMPLETE")
    (communicator,) = read(*channels, end).communicators
    assert (sorted(communicator.members), len(communicator.unknown)) == ([0], 1)


def test_nvlink_joins_the_hosts_of_a_rack() -> None:
    """NCCL counts them as one node, calls NVLinks within a host MNNVL as well, and needs no network."""
    texts = (
        "Using network Socket",
        "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
        "comm 0x{0} rank {0} nRanks 3 nNodes 1 localRanks 3 localRank {0} MNNVL 1",
        "Channel 00/0 : {0}[0] -> {1}[0] via P2P/MNNVL",
    )
    ranks = [
        "".join(told(text.format(rank, (rank + 1) % 3), host=host, pid=rank) for text in texts)
        for rank, host in enumerate("aab")
    ]
    assert findings(*ranks) == {}
    printed = shown(*ranks)
    assert re.search("P2P/MNNVL +in a host +0 > 1", printed)
    assert re.search("P2P/MNNVL +between hosts +1 > 2, 2 > 0", printed)
    assert "2 hosts, which NVLink joins" in printed
    of_one_host = shown(*ranks[:2])
    assert "1 host," in of_one_host
    assert "joins" not in of_one_host


def test_processes_of_nccl_tests_that_each_test_alone() -> None:
    """If it fails, the speed of a GPU with itself is taken for that of a network; several runs are no such case."""
    listed = [
        f"#   Rank  0 Pid {pid} on {host} device  0 [0x00] Tesla V100\n" for host, pid in (("a", 1320), ("b", 20))
    ]
    found = findings(*listed)["lone_tests"]
    assert found.what == "2 processes of nccl-tests on a, b each call themselves rank 0 of one run"
    for end in (
        "# Out of bounds values : 0 OK\n",
        "# Avg bus bandwidth    : 2.49\n",
        "a: Test NCCL failure common.cu:1 'internal error'\n",
    ):
        assert "lone_tests" not in findings(listed[0], end, listed[1])


def test_a_file_for_each_process_that_tests_alone(tmp_path: Path) -> None:
    """If it fails, processes of one launch that each test alone are read as a healthy run, or several runs as those."""
    paths = [tmp_path / name for name in ("1.log", "2.log")]
    for num_ranks, is_alone in ((1, True), (2, False)):
        for path in paths:
            path.write_text(
                "".join(
                    f"#  Rank  {rank} Group  0 Pid {path.stem} on node-a device  {rank} [0x0{rank}] A100\n"
                    for rank in range(num_ranks)
                )
                + "# Out of bounds values : 0 OK\n"
            )
        assert ("lone_tests" in [finding.code for finding in find_all(read_log(paths))]) == is_alone
