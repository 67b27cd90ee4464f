"""Kinds of logs on which a second round of public logs showed mistakes; each test keeps the lines that matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.reader import read_log
from commopt_diagnose.nccl_log.summary import to_plain, versions_of
from commopt_diagnose.nccl_log.warnings import explain
from diagnose_support.nccl_sample_logs import findings, read, told, watchdog
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


RCCL = """\
[lib] load RCCL version: 2.27.7
[2026-08-23 09:56:58] node [0] /rccl/src/init.cc:213 NCCL WARN Missing "iommu=pt" from kernel command line
node [0] NCCL INFO RCCL version : 2.27.7-HEAD:29e1567
node [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
node [0] NCCL INFO NET/IB : No device found.
node [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0> [1]tailscale0:100.64.0.7<0>
"""


def test_rccl_without_a_line_of_its_network() -> None:
    log = read(RCCL)
    assert versions_of(log) == ["2.27.7 (RCCL)"]
    found = {finding.code: finding for finding in find_all(log)}
    assert found["kernel_parameters"].severity == "warning"
    assert found["socket_network"].what.startswith("if there are several hosts, they talk over TCP")
    assert "no device and no network plugin" in found["socket_network"].why
    balancing = "h:1:1 [0] init.cc:142 NCCL WARN NUMA auto balancing enabled which can lead to variability\n"
    assert findings(balancing)["numa_balancing"].severity == "warning"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NET/OFI Request 0x7f completed with error. RC: 113. Error: 2 (UNDELIVERABLE)", "ofi_peer"),
        ("NET/OFI Request completed with error. RC: 107. Error: Inappropriate ioctl for device", "ofi_peer"),
        ("NET/OFI Request 0x7f completed with error. RC: 21. Error: unknown error", "ofi_completion"),
        ("NET/OFI Request 0x5 (SEND) completed with error: err: 5, strerror: Unresponsive receiver", "ofi_peer"),
        ("NET/OFI Could not register memory on rail 0 with flag 0", "ofi_memory"),
        ("NET/OFI Unable to register memory (type = 2) for device 0. RC: -12, Error: Cannot allocate memory",
         "ofi_memory"),
        ("NET/OFI Failed to write topology to NCCL topology file. ERROR: read-only", "ofi_note"),
        ("NET/OFI Unexpected number of remote rails for dev 3. Expected 4 but got 3", "ofi_rails"),
        ("NET/OFI OFI fi_getinfo() call failed: No data available", "ofi_setup"),
        ("NET/OFI Error accessing device 5.", "ofi"),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'.",
         "nvls_memory"),
        ("Cuda failure 2 'out of memory'", "out_of_memory"),
        ("Invalid rank requested : 2/2", "wrong_rank"),
        ("Init : invalid root 7 (root should be in the 0..0 range)", "wrong_call"),
        ("connecting to address with family 0 is neither AF_INET(2) nor AF_INET6(10)", "empty_address"),
        ("connecting to address with family 59936 is neither AF_INET(2) nor AF_INET6(10)", "no_address"),
        ("Cuda failure 400 'invalid resource handle'", "wrong_handle"),
        ("Cuda failure 101 'invalid device ordinal'", "wrong_device"),
    ],
)  # fmt: skip
def test_a_text_has_its_cause(text: str, code: str) -> None:
    entry = explain(text, "Last error")
    assert entry is not None
    assert entry.code == code


def test_full_memory_of_nvls_is_not_the_gpu_that_is_full() -> None:
    text = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'.\n"
    )
    found = findings(text)
    assert "NCCL_NVLS_ENABLE=0" in found["nvls_memory"].advice
    assert "out_of_memory" not in found
    foreign = text.partition("Failed")[0] + "step 7: loss 0.1\n"
    assert set(findings(foreign)) == {"torch_error"}, "any line may stand there"


PLUGIN = """\
h:7:7 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
h:7:7 [0] NCCL INFO NET/Plugin: Plugin load returned 0 : libc.so.6: version `GLIBC_2.34' not found (libnccl-net.so)
h:7:9 [0] NCCL INFO Using network Socket
Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_a_plugin_that_cannot_be_loaded_is_why_tcp_is_used() -> None:
    """The lines of its channels have no head."""
    log = read(PLUGIN)
    assert sum(len(member.connections) for member in log.communicators[0].all_members) == 2
    (finding,) = [finding for finding in find_all(log) if finding.code == "socket_network"]
    assert "cannot be loaded" in finding.why
    harmless = PLUGIN.replace("version `GLIBC_2.34' not found", "cannot open shared object file")
    assert "cannot be loaded" not in findings(harmless)["socket_network"].why


def test_the_loopback_interface_among_those_of_an_old_version() -> None:
    found = findings(told("NET/Socket : Using [0]lo:127.0.0.1<0> [1]eth0:10.0.0.7<0>"))["virtual_interface"]
    assert (found.severity, found.confidence) == ("note", "possible")
    assert found.advice == "set NCCL_SOCKET_IFNAME to eth0"
    assert "virtual_interface" not in findings(told("NET/Socket : Using [0]eth0:10.0.0.7<0>"))


def late(rank: int, sequence: int, operation: str, sizes: str, *, enqueued: int) -> str:
    """Returns PyTorch's two lines of a collective that timed out."""
    line = watchdog(rank, sequence, operation, numel=1).replace("NumelIn=1, NumelOut=1", sizes)
    status = f"failure detected by watchdog at work sequence id: {sequence} PG status: last enqueued work: {enqueued}"
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    head = f"[rank{rank}]:[E227 23:07:54.3 ProcessGroupNCCL.cpp:2168] {group}"
    return f"{line}{head}  {status}, last completed work: {sequence - 1}\n"


def test_a_rank_whose_line_is_cut_has_not_stayed_away() -> None:
    """The sizes of a gather prove that there are 4 ranks."""
    lines = [late(rank, 7930, "_ALLGATHER_BASE", "NumelIn=4, NumelOut=16", enqueued=7931) for rank in (1, 2, 3)]
    assert "rank 0 did not time out" in findings(*lines)["collective_timeout"].why
    cut = "[rank0]:[E617 08:47:15.010 ProcessGroupNCCL.cpp:616] [Ra\n"
    assert "did not time out" not in findings(*lines, cut)["collective_timeout"].why
    assert "all ranks wait" not in findings(*lines, cut)["collective_timeout"].why


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


def test_a_rank_that_has_started_the_collective_is_not_behind() -> None:
    """Both ranks are in different collectives: none of them has just not started."""
    gather = late(0, 619725, "_ALLGATHER_BASE", "NumelIn=54528000, NumelOut=218112000", enqueued=619732)
    scatter = late(3, 619727, "_REDUCE_SCATTER_BASE", "NumelIn=4096, NumelOut=1024", enqueued=619730)
    why = findings(gather, scatter)["collective_timeout"].why
    assert "had not started" not in why
    assert "rank 0 is the furthest behind" in why


def gdr_log(*settings: str, note: str = "DMA-BUF is available on GPU device 0") -> str:
    link = "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/1"
    return "".join(told(text) for text in (*settings, "Using network AWS Libfabric", note, link))


def test_a_plugin_without_gpudirect_where_dma_buf_is_there() -> None:
    found = findings(gdr_log())["no_gdr"]
    assert "NCCL_NET_GDR_LEVEL=PHB" in found.advice
    assert found.confidence == "likely"
    followed = findings(gdr_log("NCCL_NET_GDR_LEVEL set by environment to SYS"))["no_gdr"]
    assert "NCCL_NET_GDR_LEVEL" not in followed.advice, "advice that is followed already"
    assert "DMA-BUF" not in findings(gdr_log(note="Connected all rings"))["no_gdr"].why


def test_only_consequences_are_an_error_and_notes() -> None:
    head = "h:1:2 [0] init.cc:290 NCCL WARN"
    found = findings(
        f"{head} Attempt to use communicator before the previous operation returned ncclSuccess",
        f"{head} NET/OFI Write complete from unexpected request type!",
    )
    assert (found["ofi"].severity, found["after_error"].severity) == ("error", "note")


def test_a_rank_that_timed_out_itself() -> None:
    signal = "[rank1]:[E307 05:29:18.1 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a"
    own = findings(f"{signal} dump signal due to a collective timeout from this local rank and we will try\n")
    assert own["local_timeout"].what.startswith("rank 1 warns")
    other = findings(f"{signal} dump signal due to a collective timeout from rank 5\n")
    assert "another rank" in other["dump_signal"].why
    beside = findings(f"{signal} dump signal due to a collective timeout from this local rank\n", watchdog(1, 5))
    assert beside["local_timeout"].severity == "note"


def test_the_version_of_a_process_that_only_warns() -> None:
    text = (
        told("NCCL version 2.26.2+cuda12.2")
        + "a:7:9 [0] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'\n"
    )
    assert versions_of(read(text)) == ["2.26.2+cuda12.2"]


def test_a_failure_of_old_tests_of_nccl() -> None:
    text = "Cuda failure common.cu:891 'CUDA driver version is insufficient for CUDA runtime version'\n"
    assert "driver_too_old" in findings(text)


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
