"""A claim needs a line that carries it: without one there is a note, or nothing. Shapes are those of public logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commopt_diagnose import nccl_log
from commopt_diagnose.nccl_log.summary import versions_of
from diagnose_support.nccl_sample_logs import findings, read, told
from lightning_commopt.text.findings import read_texts

SHM = told("Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct")
NO_P2P = told("NCCL_P2P_DISABLE set by environment to 1.")


def test_a_setting_is_the_reason_of_what_follows_it() -> None:
    assert "sets NCCL_P2P_DISABLE=1" in findings(NO_P2P, SHM)["shared_memory"].why
    assert "unknown" in findings(SHM, NO_P2P)["shared_memory"].why


def test_a_process_that_uses_p2p_in_another_communicator_has_not_disabled_it() -> None:
    other = told("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", tid=99)
    assert "unknown" in findings(NO_P2P, other, SHM)["shared_memory"].why


def test_processes_that_name_no_rank_are_those_that_the_communicator_lacks() -> None:
    lines = [told("Using network Socket", host=host, pid=pid) for host, pid in (("a", 7), ("b", 9))]
    lines.append(told("comm 0x7f rank 0 nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE"))
    found = findings(*lines)
    assert found["socket_network"].severity == "slow"
    assert found["socket_network"].what.startswith("hosts talk over TCP")
    assert "no line names rank 1" in found["missing_ranks"].what
    assert findings(lines[0], lines[2])["socket_network"].severity == "note"
    third = told("Using network Socket", host="c", pid=11)
    assert findings(*lines, third)["socket_network"].severity == "note", "more processes than ranks: several jobs"


def test_ranks_that_have_connected_all_rings_do_not_hang() -> None:
    lines = []
    for rank in range(2):
        start = f"comm 0x{rank}a rank {rank} nranks 2 cudaDev {rank} busId {rank}a000 commId 0x5"
        lines.append(told(f"{start} - Init START", pid=rank, device=rank))
        lines.append(told("Connected all rings", pid=rank, device=rank))
    lines.append(told("comm 0x0a rank 0 nranks 2 cudaDev 0 busId 0a000 commId 0x5 - Init COMPLETE", pid=0))
    assert findings(*lines)["unfinished_init"].severity == "note"
    assert findings(*[line for line in lines if "rings" not in line])["unfinished_init"].severity == "error"


def test_rccl_gets_no_advice_about_nvidias_module() -> None:
    version = told("RCCL version : 2.22.3-HEAD:271856d")
    disabled = told("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'")
    connection = told("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0")
    assert "nvidia" in findings(disabled, connection)["no_gdr"].advice
    assert "nvidia" not in findings(version, disabled, connection)["no_gdr"].advice
    assert versions_of(read(NO_P2P, "RCCL version : 2.21.5-HEAD:9a0e6a1")) == ["2.21.5 (RCCL)"]


def test_an_error_that_nccl_goes_on_after_is_none() -> None:
    failed = told("net.cc:79 -> 3")
    assert findings(failed)["silent_error"].severity == "error"
    assert "silent_error" not in findings(failed, told("Using network Socket"))
    assert "silent_error" in findings(failed, told("Using network Socket", tid=9)), "another thread did"


def test_a_path_whose_name_is_cut_is_no_path() -> None:
    kinds = [
        each.path for each in read(SHM, told("Channel 01 : 0[0] -> 1[1] via P2P/CUM")).communicators[0].connections
    ]
    assert kinds == ["SHM/direct/direct"]


def timed_out(rank: int, group: str = "") -> list[str]:
    text = f"[rank{rank}]:[E] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType="
    lines = [
        f"{text}ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600011 milliseconds before timing out."
    ]
    where = (
        f"[rank{rank}]:[E] [{group} Rank {rank}] Timeout at NCCL work: 5, last enqueued NCCL work: 7, last completed"
    )
    return [*lines, f"{where} NCCL work: 4."] if group else lines


def test_ranks_without_a_line_are_not_blamed_for_a_timeout() -> None:
    start = told("comm 0x7f rank 2 nranks 16 cudaDev 2 busId 41000 commId 0x44 - Init COMPLETE")
    found = findings(start, *timed_out(4))["collective_timeout"]
    assert "did not time out" not in found.why
    assert "what the others of " in found.why


@pytest.mark.parametrize(("group", "is_sure"), [("PG ID 0 PG GUID 0(default_pg)", True), ("PG 3", False)])
def test_a_rank_may_be_outside_of_a_group(group: str, is_sure: bool) -> None:
    lines = [line for rank in (0, 1, 3) for line in timed_out(rank, group)]
    assert ("are not in this group" not in findings(*lines)["collective_timeout"].why) is is_sure


def test_interfaces_matter_between_hosts_only() -> None:
    using = "NET/Socket : Using [0]eth0:10.9.0.4<0> [1]br-ce64:172.18.0.1<0>"
    lines = [told("Using network Socket"), told(using), told("comm 0x7f rank 0 nranks 2 nNodes 2 localRanks 1")]
    assert "virtual_interface" not in findings(*lines[:2])
    assert findings(*lines)["virtual_interface"].severity == "warning"


def test_all_over_the_nic_may_be_by_settings_that_the_log_lacks() -> None:
    nic = told("Channel 01 : 0[87000] -> 1[c7000] [send] via NET/IB/5/GDRDMA")
    receiver = told("Channel 01 : 0[87000] -> 1[c7000] [receive] via NET/IB/5/GDRDMA", tid=9, device=1)
    assert findings(nic, receiver)["network_in_host"].why.startswith("unknown")
    p2p = told("Channel 02/0 : 0[87000] -> 1[c7000] via P2P/IPC")
    assert not findings(nic, receiver, p2p)["network_in_host"].why.startswith("unknown")


def test_lines_of_a_rank_without_a_name_are_of_the_only_communicator() -> None:
    channels = [told("24 coll channels, 0 nvls channels, 32 p2p channels", host=host) for host in ("a", "b")]
    end = told("comm 0x7f rank 0 nranks 2 cudaDev 0 busId 8000 commId 0x9e - Init COMPLETE")
    (communicator,) = read(*channels, end).communicators
    assert (sorted(communicator.members), len(communicator.unknown)) == ([0], 1)


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
    used = re.findall(r'_(PROCESS|RANK|PATTERNS)\["(\w+)"\]', sources)
    sections = {"PROCESS": "process", "RANK": "rank", "PATTERNS": "other"}
    assert {(sections[of], name) for of, name in used} == {(of, name) for of in sections.values() for name in table[of]}
