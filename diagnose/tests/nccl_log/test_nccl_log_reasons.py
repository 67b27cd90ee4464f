"""A claim needs a line that carries it: without one there is a note, or nothing. Shapes are those of public logs."""

from __future__ import annotations

import dataclasses

import pytest

from commopt_diagnose.nccl_log.findings import find_all
from commopt_diagnose.nccl_log.summary import versions_of
from diagnose_support.nccl_sample_logs import HEALTHY, SOCKETS, SampleJob, findings, read, told


@pytest.mark.parametrize("job", [HEALTHY, SampleJob(), SampleJob(gpus=1, hosts=["a", "b"]), SampleJob(gpus=1)])
def test_healthy_jobs_have_no_findings(job: SampleJob) -> None:
    assert find_all(read(job.mixed())) == []


def test_files_of_a_host_need_not_be_equal() -> None:
    """If it fails, hosts with their own topology, graph or log files count as set up differently."""
    names = ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
    settings = [dict.fromkeys(names, f"/opt/{host}") for host in "ab"]
    job = dataclasses.replace(HEALTHY, settings=settings[0], rank_settings=dict.fromkeys(range(4, 8), settings[1]))
    assert list(findings(job.mixed())) == ["topology_file"]


def test_sends_without_gdr_alone() -> None:
    text = HEALTHY.mixed().replace("[send] via NET/IB/0/GDRDMA", "[send] via NET/IB/0")
    assert "only sends are staged" in findings(text)["no_gdr"].why
    assert findings(text)["no_gdr"].what.startswith("4 of 8 connections")


def test_gb10_has_no_gdr_by_design() -> None:
    """If it fails, each healthy pair of DGX Spark is called slow, with modules to load that do not work there."""
    job = SampleJob(hosts=["spark-a", "spark-b"], gpus=1, between="NET/IB/0", nics=["rocep1s0f1:1/RoCE"])
    text = job.mixed().replace("busId 1b000", "busId f01000")
    found = findings(text)["no_gdr"]
    assert (found.severity, found.advice) == ("note", "nothing: no module or setting changes it")
    lines = [line.replace("f01000", "1b000") if " rank 1 " in line else line for line in text.splitlines()]
    other = findings("\n".join(lines) + "\n")["no_gdr"]
    assert (other.severity, "GB10" in other.why) == ("slow", False)


def test_virtual_interface() -> None:
    text = SOCKETS.mixed().replace("eth0", "docker0")
    assert "node-a offers peers on other hosts the interface docker0" in findings(text)["virtual_interface"].what
    assert "virtual_interface" not in findings(SampleJob().mixed().replace("eth0", "lo"))


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


def test_the_first_of_consequences_is_the_one_that_says_most() -> None:
    found = findings(
        "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting.",
        "Last error:",
        "NET/IB : Got completion from peer 10.0.0.2<38536> with error 5, opcode 48, len 32710, vendor err 249",
    )
    assert (found["ib_not_receiving"].severity, found["torch_remote_error"].severity) == ("error", "note")


def test_rccl_gets_no_advice_about_nvidias_module() -> None:
    version = told("RCCL version : 2.22.3-HEAD:271856d")
    disabled = told("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'")
    connection = told("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0")
    assert "nvidia" in findings(disabled, connection)["no_gdr"].advice
    assert "nvidia" not in findings(version, disabled, connection)["no_gdr"].advice
    assert versions_of(read(NO_P2P, "RCCL version : 2.21.5-HEAD:9a0e6a1")) == ["2.21.5 (RCCL)"]


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


def _efa(*messages: str, between: str = "NET/Libfabric/0") -> str:
    """Returns the log of two hosts over EFA, whose plugin writes further messages."""
    notes = (
        "NET/OFI Selected provider is efa, fabric is efa (found 1 nics)",
        *messages,
        "DMA-BUF is available on GPU 0",
    )
    return SampleJob(hosts=("a", "b"), gpus=1, nics=(), network="Libfabric", between=between, notes=notes).text()


@pytest.mark.parametrize(
    ("message", "setting"),
    [
        ("NET/OFI Adding NCCL_PROTO=simple to environment", "NCCL_PROTO"),
        ('NET/OFI Setting NCCL_PROTO to "simple"', "NCCL_PROTO"),
        ("NET/OFI Running on P4d platform, Setting NCCL_TOPO_FILE environment variable to /a.xml", "NCCL_TOPO_FILE"),
    ],
)
def test_settings_of_a_plugin_are_not_the_user_s(message: str, setting: str) -> None:
    """EFA delivers bytes in any order, so a run without this protocol would compute wrong sums."""
    seen = f"{setting} set by environment to simple"
    assert findings(_efa(message, seen, between="NET/Libfabric/0/GDRDMA")) == {}
    assert len(findings(_efa(seen, between="NET/Libfabric/0/GDRDMA"))) == 1


def test_fast_socket_is_tcp() -> None:
    """As in NVIDIA/nccl#1519, where no setting for GPUDirect RDMA could have helped."""
    using = "NET/FastSocket : Using [0]ens1:10.0.0.1<0> [1]ens2:10.0.1.1<0>"
    job = SampleJob(hosts=("a", "b"), gpus=1, nics=(), network="FastSocket", between="NET/FastSocket/0", notes=(using,))
    found = findings(job.text())
    assert "no_gdr" not in found
    assert "FastSocket is TCP" in found["socket_network"].why
    assert "ens2" in found["socket_network"].what


def test_google_s_form_of_the_transport_for_infiniband() -> None:
    """It is configured as NCCL's own, and lacks what that lacks."""
    notes = "NET/gIB : Using [0]mlx5_0:1/RoCE [RO]", "NET/gIB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
    job = SampleJob(hosts=("a", "b"), gpus=1, nics=(), network="gIB", between="NET/gIB/0", notes=notes)
    [process, _] = read(job.text()).processes
    assert list(process.nics) == ["mlx5_0:1/RoCE"]
    assert "nvidia-peermem" in findings(job.text())["no_gdr"].advice


def test_the_last_error_is_explained_by_the_place_of_its_warning() -> None:
    """As in pytorch#150852: PyTorch repeats the text alone, which was a second error, with advice on kernels."""
    warning = "a:7:8 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"
    last = "[rank0]: Last error:", "[rank0]: Cuda failure 1 'invalid argument'"
    assert set(findings(*last)) == {"cuda_failure"}
    assert set(findings(warning, *last)) == {"nvls"}


def test_a_plugin_for_libfabric_that_did_not_start_is_why_hosts_use_tcp() -> None:
    """If it fails, a user on EFA unsets NCCL_IB_DISABLE, which changes nothing there."""
    lines = [told("NCCL_IB_DISABLE set by environment to 1."), told("Using network Socket")]
    failed = "a:7:8 [0] nccl_net_ofi_create_plugin:259 NCCL WARN NET/OFI aws-ofi-nccl initialization failed"
    tcp = told("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0")
    assert findings(*lines, tcp)["socket_network"].why == "the environment sets NCCL_IB_DISABLE=1"
    why = findings(*lines, failed, tcp)["socket_network"].why
    assert why.endswith("is there, but could not start, and the environment sets NCCL_IB_DISABLE=1")


def test_many_hosts_are_counted_and_the_first_to_warn_is_named_first() -> None:
    warns = [f"{host}:7:8 [0] misc/socket.cc:1 NCCL WARN The moon is in the wrong place" for host in "fedcba"]
    assert findings(*warns)["warning"].what.startswith("a warning on f, e, d, c and 2 more: The moon")


def test_a_thread_without_a_gpu_warns_for_the_only_rank_of_its_process() -> None:
    """If it fails, a port that went down is put down to rank 0, or to none."""
    starts = [
        told(f"comm 0x{n} rank {n} nranks 2 cudaDev {n} busId {n}000 - Init COMPLETE", pid=n, device=n) for n in (0, 1)
    ]
    port = "a:1:99 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error"
    assert findings(*starts, port)["ib_link"].what.startswith("rank 1 warns on a: ")


def test_a_network_is_not_found_as_its_plugin_cannot_be_loaded() -> None:
    missing = "a:7:8 [0] net.cc:579 NCCL WARN Error: network gIB not found."
    loads = told(
        "NET/Plugin: Plugin load returned 2 : /lib/libc.so.6: version `GLIBC_2.32' not found (required by"
        " /opt/libnccl-net.so) : when loading libnccl-net.so"
    )
    assert findings(missing)["network_not_found"].why.startswith("NCCL_NET, a file nccl.conf or the program asks")
    found = findings(missing, loads)["network_not_found"]
    assert found.why.startswith("a network plugin is there, but cannot be loaded")
    assert "GLIBC_2.32" in found.evidence[-1].text


def test_what_rccl_writes_of_an_error_without_its_place_follows_from_the_warning_that_has_it() -> None:
    warns = "a:7:8 [1] src/transport/p2p.cc:256 NCCL WARN hipIpcGetMemHandle failed : invalid argument"
    again = "a:7:8 [1] [FATAL ERROR]: HIP failure: 'invalid argument'"
    assert findings(again)["hip_failure"].severity == "error"
    both = findings(warns, again)
    assert (both["hip_handle"].severity, both["hip_failure"].severity) == ("error", "note")
