"""nccl-log on kinds of logs of a third round: programs and launchers that report of a rank, and XLA; on large logs."""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from commopt_diagnose.nccl_log import skipping
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.terminal import print_log
from diagnose_support.nccl_sample_logs import findings, read, read_file, told

_BOOTSTRAP = told("Bootstrap : Using eth0:10.0.0.1<0>")
_CHOICE = "AllReduce: {} Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..7}}"


def _initialized(comm: str, comm_id: str, tid: int = 8) -> str:
    middle = f"ncclCommInitRank comm {comm} rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId {comm_id} - Init"
    return told(f"{middle} START", tid=tid) + told(f"{middle} COMPLETE", tid=tid)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("is_zipped", [False, True])
def test_lines_of_a_large_file_keep_their_numbers(encoding: str, is_zipped: bool, tmp_path: Path) -> None:
    """A file is read in blocks, whose ends are anywhere in a line."""
    lines = [f"step {number} of a program that has no word for us\n" for number in range(30_000)]
    places = range(0, 30_000, 997)
    for number, place in enumerate(places):
        lines[place] = told(f"NCCL_SETTING_{number} set by environment to {number}.")
    content = "".join(lines).encode(encoding)
    path = tmp_path / "large.log"
    path.write_bytes(gzip.compress(content) if is_zipped else content)
    [process] = read_file(path).processes
    found = {name: (fact.value, fact.line.number) for name, fact in process.settings.items()}
    assert found == {f"NCCL_SETTING_{n}": (str(n), place + 1) for n, place in enumerate(places)}


def test_a_line_that_never_ends_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "odd.log"
    path.write_text("x" * 3_000_000 + "\n" + _BOOTSTRAP)
    assert read_log([path]).processes[0].address == "10.0.0.1"


def test_choices_of_the_tuner_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "_MAX_CHOICES", 2)
    log = read(*(told(_CHOICE.format(size)) for size in (8, 16, 8, 8, 32, 64, 16)))
    assert {choice.num_bytes: times for choice, times in log.choices.items()} == {8: 3, 16: 2}
    assert log.num_choices_left_out == 2
    assert log.num_lines == 7


def test_lines_about_proxies_are_counted_unless_another_line_is_in_them() -> None:
    dull = told("New proxy send connection 4 from local rank 0, transport 2")
    torn = dull.strip() + told("NCCL_ALGO set by environment to Tree.", pid=9)
    log = read(_BOOTSTRAP, dull, dull, torn)
    assert log.num_lines == 5
    assert [process.settings.keys() for process in log.processes if process.settings] == [{"NCCL_ALGO"}]


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


def test_a_rank_that_only_reports_its_rings_is_not_behind() -> None:
    """Since 2.22 a thread without a name connects them, so a filter may leave nothing else of a rank."""
    starts = [
        told(f"ncclCommInitAll comm 0x{r} rank {r} nranks 2 cudaDev {r} busId {r}000 commId 0xa - Init START", device=r)
        for r in (0, 1)
    ]
    rings = [told("Connected all rings, use ring PXN 0 GDR 1", tid=20 + rank, device=rank) for rank in (0, 1)]
    connection = told("Channel 01 : 0[0] -> 1[1] via P2P/IPC", tid=20)
    unfinished = findings(*starts, connection, *rings)["unfinished_init"]
    assert "ranks 0, 1 are at the point where all rings are connected" in unfinished.why


def test_a_rank_that_is_behind_is_no_error_before_another_is_ready() -> None:
    """No rank gets far without the others, so lines are missing."""
    comm = "comm 0x{0} rank {0} nranks 2 cudaDev {0} busId {0}000 commId 0xa - Init {1}"
    starts = [told(comm.format(rank, "START"), device=rank) for rank in (0, 1)]
    connection = told("Channel 01 : 0[0] -> 1[1] via P2P/IPC")
    unfinished = findings(*starts, connection)["unfinished_init"]
    assert (unfinished.severity, "rank 1 is the furthest behind" in unfinished.why) == ("note", True)
    ready = findings(*starts, connection, told(comm.format(0, "COMPLETE")))["unfinished_init"]
    assert ready.severity == "error"


def test_hosts_that_nvlink_joins_are_still_hosts() -> None:
    """NCCL counts them as one node, and what network they would have otherwise does not matter."""
    ranks = [
        told("Using network Socket", host=host)
        + told(f"NET/IB : GPU Direct RDMA Disabled for HCA 0 '{host}'", host=host)
        + told(f"comm 0x{rank} rank {rank} nRanks 2 nNodes 1 localRanks 2 localRank {rank} MNNVL 1", host=host)
        + told(f"Channel 00/0 : {rank}[0] -> {1 - rank}[0] via P2P/MNNVL", host=host)
        for rank, host in enumerate(("a", "b"))
    ]
    log = read(*ranks)
    assert find_all(log) == []
    file = io.StringIO()
    print_log(log, [], Console(file=file, width=200))
    printed = file.getvalue()
    assert "2 hosts, which NVLink joins" in printed
    assert re.search("P2P/MNNVL +between hosts", printed)


def test_a_log_without_nccl_is_none_because_of_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("CUDA out of memory. Tried to allocate 2 GiB\nexitcode: -9 (pid: 7)\n")
    with pytest.raises(ValueError, match="no line of NCCL"):
        read_log([path])


def test_the_first_of_consequences_is_the_one_that_says_most() -> None:
    found = findings(
        "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
        "Last error:",
        "NET/IB : Got completion from peer 10.0.0.2<38536> with error 5, opcode 48, len 32710, vendor err 249",
    )
    assert (found["ib_not_receiving"].severity, found["torch_remote_error"].severity) == ("error", "note")
