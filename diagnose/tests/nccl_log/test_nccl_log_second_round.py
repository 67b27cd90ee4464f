"""Kinds of logs on which a second round of public logs showed mistakes; each test keeps the lines that matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import to_plain, versions_of
from diagnose_support.nccl_sample_logs import PLUGIN, RCCL, findings, read, told
from support.commopt import commopt


def rank_lines(host: str, pid: int, rank: int, *, settings: str = "") -> list[str]:
    """Returns the lines of one of two ranks; a thread sets up the communicator."""
    main, thread = f"{host}:{pid}:{pid} [{rank}] NCCL INFO ", f"{host}:{pid}:{pid + 100} [{rank}] NCCL INFO "
    named = f"comm 0x55e{rank} rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank}a000 commId 0x9e37"
    return [
        f"{main}Bootstrap : Using bond0:10.0.0.{rank + 1}<0>",
        *([f"{main}{settings} set by environment to 1."] if settings else []),
        f"{thread}Using network AWS Libfabric",
        f"{thread}{named} - Init START",
        f"{thread}Trees [0] {1 - rank}/-1/-1->{rank}->-1",
        f"{thread}Channel 00/0 : {1 - rank}[{1 - rank}] -> {rank}[{rank}] [receive] via NET/AWS Libfabric/1/GDRDMA",
        f"{thread}Connected all rings",
        f"{thread}{named} - Init COMPLETE",
    ]


FIRST, SECOND = rank_lines("x3001c0s1b0n0", 849778, 0), rank_lines("x3002c0s25b1n0", 849880, 1)


@pytest.mark.parametrize(
    "torn",
    [
        "x3001cx3002c0s25b1n0:849880:849980 [1] NCCL INFO Connected all trees",  # the beginning of another name
        "n0:849880:849980 [1] NCCL INFO Connected all trees",  # the end of its own
        "x3n0:849880:849980 [1] NCCL INFO Connected all trees",  # the middle is missing
        "P2P/CUMEM/reax3002c0s25b1n0:849880:849980 [1] NCCL INFO Connected all trees",
    ],
)
def test_a_torn_name_is_no_host_of_its_own(torn: str) -> None:
    log = read("\n".join([*FIRST, *SECOND, torn]) + "\n")
    (communicator,) = log.communicators
    assert {process.host for process in log.processes} == {"x3001c0s1b0n0", "x3002c0s25b1n0"}
    assert (communicator.num_ranks, communicator.missing, communicator.unknown) == (2, [], [])
    assert [torn.count for torn in log.torn.values()] == [1]
    (note,) = [finding for finding in find_all(log) if finding.code == "torn_lines"]
    assert note.severity == "note"
    assert "1 line" in note.what


def test_the_first_line_of_a_process_may_be_the_torn_one() -> None:
    torn = f"x3001c{SECOND[0]}"
    log = read("\n".join([*FIRST, torn, *SECOND[1:]]) + "\n")
    assert {process.host for process in log.processes} == {"x3001c0s1b0n0", "x3002c0s25b1n0"}
    assert len(log.communicators) == 1


def test_hosts_whose_processes_have_equal_numbers_are_two_hosts() -> None:
    """Containers number their processes from 1, and a name may be the end of another one."""
    lines = [f"{host}:21:27 [0] NCCL INFO Using network Socket\n" for host in ("trainer-9", "trainer-10", "main")]
    assert [process.host for process in read(*lines).processes] == ["trainer-9", "trainer-10", "main"]
    clones = [f"{host}:84977:84999 [0] NCCL INFO Using network Socket\n" for host in ("node-9", "node-10")]
    assert [process.host for process in read(*clones).processes] == ["node-9", "node-10"]


def test_a_missing_setting_proves_nothing_among_torn_lines() -> None:
    settings = rank_lines("x3001c0s1b0n0", 849778, 0, settings="NCCL_CROSS_NIC")
    whole = "\n".join([*settings, *SECOND]) + "\n"
    torn = f"{whole}NCCL_CROSx3002c0s25b1n0:849880:849980 [1] NCCL INFO Connected all trees\n"
    assert "different_settings" in findings(whole)
    assert "different_settings" not in findings(torn)
    other = told("NCCL_CROSS_NIC set by environment to 2.").partition("NCCL INFO ")[2]
    differs = torn + f"x3002c0s25b1n0:849880:849880 [1] NCCL INFO {other}"
    assert findings(differs)["different_settings"].confidence == "possible"


def test_what_is_only_possible_is_printed_as_such(tmp_path: Path) -> None:
    path = tmp_path / "log"
    text = "ncclSocketInit: connecting to address with family 1 is neither AF_INET(2) nor AF_INET6(10)"
    path.write_text(f"h:1:2 [0] misc/socket.cc:8 NCCL WARN {text}\n")
    assert "error (possible): " in commopt("nccl-log", path).stdout
    assert json.loads(commopt("nccl-log", "--json", path).stdout)["findings"][0]["confidence"] == "possible"


def test_rccl_without_a_line_of_its_network() -> None:
    log = read(RCCL)
    assert versions_of(log) == ["2.27.7 (RCCL)"]
    found = {finding.code: finding for finding in find_all(log)}
    assert found["kernel_parameters"].severity == "warning"
    assert found["socket_network"].what.startswith("if there are several hosts, they talk over TCP")
    assert "no device and no network plugin" in found["socket_network"].why
    balancing = "h:1:1 [0] init.cc:142 NCCL WARN NUMA auto balancing enabled which can lead to variability\n"
    assert findings(balancing)["numa_balancing"].severity == "warning"


def test_a_plugin_that_cannot_be_loaded_is_why_tcp_is_used() -> None:
    """The lines of its channels have no head."""
    log = read(PLUGIN)
    assert sum(len(member.connections) for member in log.communicators[0].all_members) == 2
    (finding,) = [finding for finding in find_all(log) if finding.code == "socket_network"]
    assert "cannot be loaded" in finding.why
    harmless = PLUGIN.replace("version `GLIBC_2.34' not found", "cannot open shared object file")
    assert "cannot be loaded" not in findings(harmless)["socket_network"].why


def test_calls_have_the_number_of_ranks(tmp_path: Path) -> None:
    calls = [
        told(f"AllReduce: opCount {number:x} sendbuff 0x7f recvbuff 0x7f count 8 comm 0x7fa0 [nranks=8] stream 0x9")
        for number in range(3)
    ]
    path = tmp_path / "log"
    path.write_text("".join(calls))
    log = read_log([path])
    assert [(each.num_ranks, each.count) for each in log.communicators] == [(8, 1)]
    assert to_plain(log, [])["num_nccl_lines"] == 3


def test_the_version_of_a_process_that_only_warns() -> None:
    text = (
        told("NCCL version 2.26.2+cuda12.2")
        + "a:7:9 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'\n"
    )
    assert versions_of(read(text)) == ["2.26.2+cuda12.2"]


def test_lines_that_come_again_are_one_communicator_and_one_warning() -> None:
    """A file may be named twice, or hold its lines several times: an id belongs to one communicator."""
    warning = f"{FIRST[0].partition('NCCL INFO')[0]}init.cc:9 NCCL WARN Duplicate GPU detected : rank 1 and rank 0"
    ended = [line.replace("Init COMPLETE", "Abort COMPLETE") for line in (FIRST[-1], SECOND[-1])]
    text = "\n".join([*FIRST, *SECOND, *ended, warning]) + "\n"
    log = read(text, text, text)
    assert [(each.num_ranks, len(each.members), each.unknown) for each in log.communicators] == [(2, 2, [])]
    assert [warning.times for warning in log.warnings] == [3]
    assert "(3 times)" in {finding.code: finding for finding in find_all(log)}["same_gpu"].what


def test_a_call_into_which_another_line_was_written_is_read(tmp_path: Path) -> None:
    call = told("AllReduce: opCount 1 sendbuff 0x7f recvbuff 0x7f count 8 comm 0x7fa0 [nranks=8] stream 0x9")
    path = tmp_path / "log"
    path.write_text(call + call.rstrip() + told("NET/IB : No device found.", host=" node-b", pid=9000))
    assert {process.host for process in read_log([path]).processes} == {"a", "node-b"}
