"""How runs end, what is cut away, and what is no log of ranks: shapes of public logs, written here."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from commopt_diagnose.nccl_log.communicators import NcclLog
from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import extras_of, versions_of
from commopt_diagnose.nccl_log.terminal import print_log
from diagnose_support.nccl_sample_logs import SampleJob, findings, read

HEAD = "node-a:10:11 [0] NCCL INFO "


def shown(log: NcclLog) -> str:
    output = io.StringIO()
    print_log(log, find_all(log), Console(file=output, width=200, color_system=None))
    return output.getvalue()


def test_a_whole_run_that_pytorch_ends_by_aborting_has_no_errors() -> None:
    ends = "".join(
        f"node-a:10:19 [0] proxy.cc:1458 NCCL WARN {text}\n"
        for text in (
            "[Service thread] Accept failed Resource temporarily unavailable",
            "[Service thread] Could not receive type from localRank 3, res=3, closed=0",
            "[Proxy Service 3] Failed to execute operation Close from rank 3, retcode 3",
        )
    )
    ends += f"{HEAD}misc/socket.cc:64 -> 3\n{HEAD}comm 0x5f00 rank 0 nranks 1 cudaDev 0 busId 1000 - Abort COMPLETE\n"
    found = findings(SampleJob().mixed() + ends)
    assert {code: finding.severity for code, finding in found.items()} == {"shutdown": "note"}


def test_what_only_follows_is_a_note_beside_an_unknown_warning() -> None:
    torch = "RuntimeError: NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
    assert findings(torch)["refused_call"].severity == "error"
    found = findings(f"{torch}Last error:\n2: NET/IB : The moon is in the wrong place\n")
    assert (found["refused_call"].severity, found["warning"].severity) == ("note", "warning")
    assert found["warning"].what == "a warning: NET/IB : The moon is in the wrong place"
    assert "merged" in findings(f"{torch}Last error:\nNET/IB : Requested properties for vNic 8\n")["merged_nics"].why


def test_a_prefix_of_ray_is_no_part_of_an_error() -> None:
    ray = "(Engine pid=23, ip=10.0.0.1) "
    found = findings(f"{ray}Last error:\n{ray}Proxy Call to rank 7 failed (Connect)\n")
    assert found["proxy_failed"].what == "a warning: Proxy Call to rank 7 failed (Connect)"


def test_the_watchdogs_line_may_break_before_the_work() -> None:
    lines = "".join(
        f"job.node-b [stderr] [rank{rank}]:[E909 09:55:29.3 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught"
        " collective operation timeout: \nWorkNCCL(SeqNum=2070, OpType=REDUCE, NumelIn=1, NumelOut=1,"
        " Timeout(ms)=600000) ran for 600034 milliseconds before timing out.\n"
        for rank in (11, 12, 14)
    )
    assert "ranks 11, 12, 14 in REDUCE 2070" in findings(lines)["collective_timeout"].what


def test_a_cut_id_makes_no_other_communicator() -> None:
    start = "ncclCommInitRank comm 0x5f0{rank} rank {rank} nranks 3 cudaDev {rank} busId {rank}0 commId 0x996ee6f117cb"
    lines = [f"n:1{rank}:2{rank} [{rank}] NCCL INFO {start.format(rank=rank)}8e1e - Init START" for rank in (0, 1)]
    lines.append(f"n:12:22 [2] NCCL INFO {start.format(rank=2)}")
    (communicator,) = read("\n".join(lines)).communicators
    assert list(communicator.members) == [0, 1, 2]


def test_a_cut_warning_is_left_out_unless_it_is_known(tmp_path: Path) -> None:
    unknown = f"{HEAD}Using network IB\nnode-a:10:11 [0] misc/ibvwrap.cc:63 NCCL WARN Fai"
    known = "node-a:10:11 [0] NCCL WARN Call to connect returned Connection refused, re"
    for name, text in (("unknown", unknown), ("known", known)):
        (tmp_path / name).write_text(text)
    assert "warning" not in [finding.code for finding in find_all(read_log([tmp_path / "unknown"]))]
    assert "unreachable" in [finding.code for finding in find_all(read_log([tmp_path / "known"]))]


def test_nvls_is_unused_only_where_the_number_of_its_channels_is_known() -> None:
    begin = f"{HEAD}comm 0x5f rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0\n"
    begin += f"{HEAD}NVLS multicast support is available on dev 0\n"
    assert extras_of(read(begin).communicators[0])["NVLS"] == "available"
    rest = f"{HEAD}16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels\n"
    assert extras_of(read(begin + rest).communicators[0])["NVLS"] == "available, not used"


def test_rccl_names_the_number_of_ranks_in_each_line() -> None:
    line = "Channel 00/0 : 16[17000] -> 18[21000] via P2P/IPC comm 0x5609 nRanks 32"
    warn = "node-a:10:11 [0] src/init.cc:20 NCCL WARN MSCCL++: Cannot enable MSCCL++\n"
    text = f"{HEAD}RCCL version : 2.22.3-HEAD:271856d\n{HEAD}{line}\n{warn}"
    log = read(text)
    assert (versions_of(log), log.communicators[0].num_ranks) == (["2.22.3 (RCCL)"], 32)
    assert findings(text)["mscclpp"].severity == "note"


def test_packages_name_the_version_where_nccl_does_not() -> None:
    """Such as in the output of pip or of torch's collect_env."""
    package, line = "[pip3] nvidia-nccl-cu12==2.19.3\n", f"{HEAD}Connected all rings\n"
    assert versions_of(read(package + line)) == ["2.19.3"]
    assert versions_of(read(package + line + "NCCL version 2.21.5+cuda12.4\n")) == ["2.21.5+cuda12.4"]


def test_processes_without_a_communicator_are_shown() -> None:
    text = "#  Rank  0 Group  0 Pid     10 on node-a device  0 [0x07] A100\n" + "".join(
        f"{host}:10:11 [0] NCCL INFO {message}\n"
        for host in ("node-a", "node-b")
        for message in ("NET/IB: [0] mlx5_3:1/IB", "NCCL_IB_DISABLE set by environment to 1.")
    )
    log, found = read(text), findings(text)
    assert "1 on node-a, 1 on node-b, NICs mlx5_3:1/IB\nnccl-tests lists 1 rank on node-a" in shown(log)
    assert (found["socket_network"].severity, found["socket_network"].what) == (
        "slow",
        "hosts talk over TCP (network Socket)",
    )
    assert "socket_network" not in findings(text.replace("node-b", "node-a"))
    assert "1 on node-a" in shown(read(f"{HEAD}NET/OFI Initializing aws-ofi-nccl 1.9.1-aws\n"))


def test_lines_that_name_no_communicator_belong_to_the_one_that_lacks_their_rank() -> None:
    """Threads of one process, of which a cut log has the name of the communicator only for some."""
    name = "n:9:1{rank} [{rank}] NCCL INFO comm 0x5f0{rank} rank {rank} nRanks 4 nNodes 1 localRanks 4 localRank 0\n"
    tree = "n:9:1{rank} [{device}] NCCL INFO Trees [0] -1/-1/-1->{rank}->0\n"
    named = "".join(name.format(rank=rank) for rank in (0, 2))
    (communicator,) = read(named + "".join(tree.format(rank=rank, device=rank) for rank in (1, 3))).communicators
    assert communicator.is_complete
    # Another rank on a GPU that has one already is in another communicator.
    assert len(read(named + "".join(tree.format(rank=rank, device=2) for rank in (1, 3))).communicators) > 1


def test_quotes_are_no_part_of_a_host() -> None:
    log = read("log `node-a:10:11 [1] NCCL INFO Using network IB\nnode-a:10:11 [1] NCCL INFO Using network IB\n")
    assert [process.host for process in log.processes] == ["node-a"]


def test_a_socket_never_has_gpudirect() -> None:
    found = findings(f"{HEAD}NET/Socket : GPU Direct RDMA Disabled for HCA 0 'enp1s0f0'\n")
    assert set(found) == {"unknown"}
    assert "no_gdr" in findings(f"{HEAD}NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n")


def test_pairs_of_several_hosts_are_not_put_on_one() -> None:
    line = "{host}:1{rank}:2{rank} [0] NCCL INFO Channel 01 : {first}[1c0] -> {last}[1d0] [{way}] via NET/Socket/0\n"
    text = "".join(
        line.format(host=host, rank=rank, first=first, last=first + 1, way="send" if rank == first else "receive")
        for host, first in (("node-a", 0), ("node-b", 2))
        for rank in (first, first + 1)
    )
    found = findings(text)["network_in_host"]
    assert "(0 and 1, 2 and 3) are each on one host (node-a, node-b) but talk over NET/Socket" in found.what


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


def test_ras_report() -> None:
    log = read(RAS)
    found = [(finding.severity, finding.what) for finding in find_all(log)]
    assert found == [
        (
            "error",
            "RAS reports INCOMPLETE for the job: Missing communicator data from 1 job process, Process 604 on node"
            " 10.4.0.13 managing GPU 0",
        ),
        (
            "error",
            "RAS reports INCOMPLETE for communicator 0xb3398875b8b2a063: Missing communicator data from 1 rank, Rank 1"
            " (process 604 on 10.4.0.13)",
        ),
        (
            "warning",
            "RAS reports MISMATCH for communicator 0xfa93daea854b060b: Communicator ranks have different AllGather"
            " operation counts, 30 ranks have launched up to operation 640, Rank 12 has launched up to operation 641"
            " (process 32 on 10.13.0.124)",
        ),
    ]


def test_a_port_of_ras_is_no_fault_of_the_run() -> None:
    warn = "node-a:10:11 [0] ras/client_support.cc:1 NCCL WARN Call to bind failed: Address already in use\n"
    assert findings(warn)["ras_port"].severity == "note"
    assert "ras_port" not in findings(warn.replace("ras/client_support", "misc/socket"))


def test_one_cut_line_of_a_ring_is_no_communicator_of_one_rank() -> None:
    log = read(f"{HEAD}Channel 00/02 :    0\n")
    assert (log.communicators[0].num_ranks, "ring on" in shown(log)) == (None, False)
