"""Who wrote a line, also where processes have torn each other's lines."""

from __future__ import annotations

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.lines import split_line
from diagnose_support.nccl_sample_logs import (
    SampleJob,
    findings,
    read,
    told,
)


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


def test_lines_that_come_again_are_one_communicator_and_one_warning() -> None:
    """A file may be named twice, or hold its lines several times: an id belongs to one communicator."""
    warning = f"{FIRST[0].partition('NCCL INFO')[0]}init.cc:9 NCCL WARN Duplicate GPU detected : rank 1 and rank 0"
    ended = [line.replace("Init COMPLETE", "Abort COMPLETE") for line in (FIRST[-1], SECOND[-1])]
    text = "\n".join([*FIRST, *SECOND, *ended, warning]) + "\n"
    log = read(text, text, text)
    assert [(each.num_ranks, len(each.members), each.unknown) for each in log.communicators] == [(2, 2, [])]
    assert [warning.times for warning in log.warnings] == [3]
    assert "(3 times)" in {finding.code: finding for finding in find_all(log)}["same_gpu"].what


def test_two_lines_in_one() -> None:
    first, second = (
        "n1:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P",
        "n1:9:9 [1] NCCL INFO Connected all rings",
    )
    found = list(split_line(first + second, "log", 1))
    assert [each.is_whole for each in found] == [False, True]
    assert found[1].text == "Connected all rings"


def test_the_text_of_another_program_in_front_of_a_head() -> None:
    """If it fails, a log of which all ends of lines are lost hides the timeout in front of its first line of NCCL."""
    watchdog = (
        "[rank1]:[E104 18:02:55 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=5, NumelOut=5, Timeout(ms)=600000) ran for 600050 milliseconds"
    )
    bootstrap = "n1:812:812 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>"
    log = read(f"vLLM is using nccl==2.27.3 {watchdog} before timing out. {bootstrap}\n")
    assert [timeout.rank for timeout in log.timeouts.values()] == [1]
    assert list(log.packages) == ["2.27.3"]
    assert [process.host for process in log.processes] == ["n1"]


def test_a_broken_line_in_front_of_a_head() -> None:
    """Ranks that write at the same time break each other's lines; no host comes of that."""
    broken = "node-a:400node-a:4010:4015 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/CUMEM/read\n"
    log = read(SampleJob().mixed() + broken)
    assert {process.host for process in log.processes} == {"node-a"}
    assert len(log.processes) == 4


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


def test_an_error_that_nccl_goes_on_after_is_none() -> None:
    failed = told("net.cc:79 -> 3")
    assert findings(failed)["silent_error"].severity == "error"
    assert "silent_error" not in findings(failed, told("Using network Socket"))
    assert "silent_error" in findings(failed, told("Using network Socket", tid=9)), "another thread did"


def test_the_rest_of_a_head_is_no_process() -> None:
    """If it fails, a cut first line makes a second communicator."""
    lines = [told(f"Channel {n:02d}/0 : 3[3] -> 4[4] via P2P/IPC", pid=118633, tid=121364) for n in (0, 1, 2)]
    begun = "(Worker pid=9, ip=10.0.0.4) 4 " + lines[0].partition(" ")[2]
    [communicator] = read(begun, *lines[1:]).communicators
    assert communicator.count == 1
    assert len(communicator.connections) == 2


def test_one_process_does_not_tear_its_own_lines() -> None:
    """If it fails, the table of nccl-tests, between whose numbers NCCL writes, is taken for another process."""
    table = f"     8388608       2097152     float     sum      -1{FIRST[0]}"
    log = read("\n".join([*FIRST, table]) + "\n")
    assert log.torn
    assert [finding.code for finding in find_all(log) if finding.code == "torn_lines"] == []
