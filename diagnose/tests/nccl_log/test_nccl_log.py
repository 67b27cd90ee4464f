"""What ``commopt nccl-log`` reads and finds, in logs that are written here after public reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.lines import split_line
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import extras_of, paths_of, rings_of, to_plain, versions_of
from diagnose_support.nccl_sample_logs import HEALTHY, SampleJob, findings, read, watchdog

VERSIONS = ["2.4.8", "2.5.7", "2.8.4", "2.9.9", "2.14.3", "2.16.5", "2.18.5", "2.21.5", "2.24.3", "2.27.7", "2.30.7"]


def facts(log: NcclLog) -> list[object]:
    """What must not depend on how the lines came into the file."""
    return [
        (c.num_ranks, len(c.machines), sorted(c.members), sorted(paths_of(c)), rings_of(c)) for c in log.communicators
    ]


def change(job: SampleJob, **changes: object) -> SampleJob:
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read_alike(version: str) -> None:
    log = read(change(HEALTHY, version=f"{version}+cuda12.4").mixed())
    (communicator,) = log.communicators
    assert (communicator.num_ranks, len(communicator.machines), communicator.missing) == (8, 2, [])
    paths = {(path.name, path.place): path.pairs for path in paths_of(communicator)}
    assert paths["P2P/CUMEM/read", "in a host"] == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    assert paths["NET/IB/GDRDMA", "between hosts"] == [(3, 4), (7, 0)]
    assert extras_of(communicator)["GPUDirect RDMA"] == "8 of 8 connections"
    assert versions_of(log) == [f"{version}+cuda12.4"]
    assert find_all(log) == []


def test_one_file_for_each_rank_or_all_in_one(tmp_path: Path) -> None:
    apart = read_log(HEALTHY.write(tmp_path))
    assert facts(apart) == facts(read(HEALTHY.mixed(seed=1))) == facts(read(HEALTHY.text()))
    assert find_all(apart) == []


@pytest.mark.parametrize(
    "prefix",
    [
        *("[1,0]<stdout>:", "(RayTrainWorker pid=581, ip=10.2.1.8) ", "3: ", "[155] ", "[default0]:"),
        *("[2026-05-05 06:16:47] ", "2026-05-05T06:16:47Z ", "06:16:47 ", "2026-05-05 06:16:47,123 INFO \n"),
        "\x1b[36m(pid=12)\x1b[0m ",
    ],
)
def test_what_a_launcher_puts_in_front_does_not_matter(prefix: str) -> None:
    plain = HEALTHY.mixed()
    assert facts(read("".join(f"{prefix}{line}\n" for line in plain.splitlines()))) == facts(read(plain))


def test_dropped_heads(tmp_path: Path) -> None:
    """A file for each rank still tells everything but the host."""
    for path in HEALTHY.write(tmp_path):
        heads = path.read_text().splitlines()
        path.write_text("".join(f" [{line.partition(' [')[2]}\n" for line in heads))
    (communicator,) = read_log(sorted(tmp_path.iterdir())).communicators
    assert sorted(communicator.members) == list(range(8))
    assert sum(len(path.pairs) for path in paths_of(communicator)) == 8


def test_lost_beginning() -> None:
    """Ranks are known from their connections and trees, where the log begins behind ``Init START``."""
    lines = HEALTHY.mixed().splitlines()
    kept = [line for line in lines if " via " in line or "Trees" in line]
    (communicator,) = read("\n".join(kept)).communicators
    assert sorted(communicator.members) == list(range(8))
    assert find_all(read("\n".join(kept))) == []


def test_two_lines_in_one() -> None:
    first, second = (
        "n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P",
        "n1:9:9 [1] NCCL INFO Connected all rings",
    )
    found = list(split_line(first + second, "log", 1))
    assert [each.is_whole for each in found] == [False, True]
    assert found[1].text == "Connected all rings"


def test_a_broken_line_in_front_of_a_head() -> None:
    """Ranks that write at the same time break each other's lines; no host comes of that."""
    broken = "node-a:400node-a:4010:4015 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/CUMEM/read\n"
    log = read(SampleJob().mixed() + broken)
    assert {process.host for process in log.processes} == {"node-a"}
    assert len(log.processes) == 4


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


NO_NICS = {"nics": (), "network": "Socket", "between": "NET/Socket/0", "in_host": "P2P/CUMEM"}
SOCKETS = change(HEALTHY, **NO_NICS)


@pytest.mark.parametrize("job", [HEALTHY, SampleJob(), SampleJob(gpus=1, hosts=["a", "b"]), SampleJob(gpus=1)])
def test_healthy_jobs_have_no_findings(job: SampleJob) -> None:
    assert find_all(read(job.mixed())) == []


def test_files_of_a_host_need_not_be_equal() -> None:
    """If it fails, hosts with their own topology, graph or log files count as set up differently."""
    names = ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
    settings = [dict.fromkeys(names, f"/opt/{host}") for host in "ab"]
    job = change(HEALTHY, settings=settings[0], rank_settings=dict.fromkeys(range(4, 8), settings[1]))
    assert list(findings(job.mixed())) == ["topology_file"]


def test_sends_without_gdr_alone() -> None:
    text = HEALTHY.mixed().replace("[send] via NET/IB/0/GDRDMA", "[send] via NET/IB/0")
    assert "only sends are staged" in findings(text)["no_gdr"].why
    assert findings(text)["no_gdr"].what.startswith("4 of 8 connections")


def test_virtual_interface() -> None:
    text = SOCKETS.mixed().replace("eth0", "docker0")
    assert "node-a offers peers on other hosts the interface docker0" in findings(text)["virtual_interface"].what
    assert "virtual_interface" not in findings(SampleJob().mixed().replace("eth0", "lo"))


@pytest.mark.parametrize(
    ("text", "code"), [("Cuda failure 'out of memory'", "out_of_memory"), ("The moon is in the wrong place", "warning")]
)
def test_warning(text: str, code: str) -> None:
    log = f"\nnode-a:4000:4005 [0] transport/net_ib.cc:1295 NCCL WARN {text}\n"
    found = findings(SampleJob().mixed() + log * 2)[code]
    assert found.what == f"rank 0 warns on node-a: {text} (2 times)"
    assert found.severity == ("warning" if code == "warning" else "error")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5", "torch_error"),
        ("unhandled cuda error, NCCL version 2.21.5", "torch_error"),
        ("invalid usage, NCCL version 2.21.5", "refused_call"),
        ("remote process exited or there was a network error, NCCL version 2.21.5", "torch_remote_error"),
    ],
)
def test_errors_of_torch(words: str, code: str) -> None:
    line = (
        f"[rank1]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/c10d/NCCLUtils.hpp:317, {words}\n"
    )
    found = findings(SampleJob().mixed() + line)
    assert set(found) == {code}
    assert found[code].what.startswith("rank 1 warns: ")


def progress(rank: int, enqueued: int, group: int = 0) -> str:
    return f"[PG ID {group} PG GUID 0 Rank {rank}]  PG status: last enqueued work: {enqueued}, last completed work: 4\n"


def test_timeouts() -> None:
    start = SampleJob().mixed()
    alone = findings(start + "".join(watchdog(rank, 5) for rank in (0, 1, 3)))["collective_timeout"]
    assert alone.what == "a collective timed out after 600 s: ranks 0, 1, 3 in ALLREDUCE 5 (NumelIn=8, NumelOut=8)"
    assert alone.why.startswith("rank 2 did not time out")
    all_of_them = start + "".join(watchdog(rank, 5) * 3 for rank in range(4))
    assert findings(all_of_them)["collective_timeout"].why.startswith("all ranks wait in the same collective")
    other = findings(start + watchdog(0, 5) + watchdog(1, 5) + watchdog(2, 5, numel=9) + watchdog(3, 5))
    assert "different operations or sizes" in other["collective_timeout"].why
    other_group = progress(0, 90, group=1)
    behind = findings(all_of_them + other_group + "".join(progress(rank, 5 - (rank == 2)) for rank in range(4)))[
        "collective_timeout"
    ]
    assert behind.why == "rank 2 had not started it: the last collective there is number 4, 5 elsewhere"


def test_tuner() -> None:
    lines = [
        "AllReduce: 4194304 Bytes -> Algo 1 proto 2 time 55.3",
        "AllReduce: 67108864 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..7}",
        "AllGather [Symmetric]: 8192 Bytes -> Kernel AllGather_LL nchannels 4 nthreads 512 nWorks 1",
    ]
    text = SampleJob(settings={"NCCL_PROTO": "LL"}).mixed() + "".join(
        f"n:1:2 [0] NCCL INFO {line}\n" for line in lines * 2
    )
    log = read(text)
    assert set(log.choices.values()) == {2}
    assert {choice.algorithm for choice in log.choices} == {"RING", "Symmetric AllGather_LL"}
    assert findings(text)["small_protocol"].why == "the environment sets NCCL_PROTO=LL"


def test_plain_is_complete() -> None:
    log = read(HEALTHY.mixed())
    plain = to_plain(log, find_all(log))
    (communicator,) = plain["communicators"]
    assert communicator["num_ranks"] == 8
    assert communicator["networks"] == ["IB"]
    assert communicator["rings"] == [{"ranks": tuple(range(8)), "channels": [0, 1]}]
    assert len(communicator["ranks"][3]["connections"]) == 2
    assert plain["processes"][0]["nics"] == ["mlx5_0:1/IB"]
