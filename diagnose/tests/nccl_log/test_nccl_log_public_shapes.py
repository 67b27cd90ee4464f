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
from diagnose_support.nccl_sample_logs import HEALTHY, TRACEBACK, SampleJob, findings, read, told, watchdog
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


def test_the_last_error_of_a_traceback_is_a_warning_like_others() -> None:
    found = findings(TRACEBACK)
    assert found["same_gpu"].what == "rank 3 warns: Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000"
    inline = findings("RuntimeError: ... Last NCCL warning(error): 'Bootstrap : no socket interface found'\n")
    assert "no_interface" in inline
    assert versions_of(read(TRACEBACK)) == ["2.19.3"]


def test_a_line_of_the_watchdog_that_a_terminal_broke() -> None:
    broken = watchdog(2, 4).replace("OpType", "OpTy\npe")
    (timeout,) = read(broken).timeouts.values()
    assert (timeout.rank, timeout.sequence, timeout.operation, timeout.limit_s) == (2, 4, "ALLREDUCE", 600.0)


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
