"""nccl-log on a fifth round of logs: how processes end, stores that ranks miss, Google's plugins, and Meta's NCCLX."""

from __future__ import annotations

import pytest

from diagnose_support.nccl_sample_logs import SampleJob, findings, read, told

_START = told("Bootstrap : Using eth0:10.0.0.1<0>")
_WORKER = "RuntimeError: DataLoader worker (pid 4821) is killed by signal:"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("[cf0b62962198:378934:0:382579] Caught signal 7 (Bus error: nonexistent physical address)", "bus_error"),
        ("srun: error: nid12: tasks 0-3: Bus error (core dumped)", "bus_error"),
        (f"{_WORKER} Bus error. It is possible that dataloader's workers are out of shared memory.", "bus_error"),
        ("ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -7) local_rank: 0", "bus_error"),
        ("[ib-vm-61:343042:0:345015] Caught signal 11 (Segmentation fault: address not mapped to object)", "crashed"),
        ("[9e379b1f2389:01615] Signal: Segmentation fault (11)", "crashed"),
        ("(W pid=694) *** SIGSEGV received at time=1778800000 on cpu 3 ***", "crashed"),
        ("Fatal Python error: Segmentation fault", "crashed"),
        ("python[4242]: segfault at 28 ip 00007f1c sp 00007ffe error 4 in libnccl.so.2.27.5[7f1c+1000]", "crashed"),
        ("[ERROR] [launch.py:325:sigkill_handler] ['python', 'a.py'] exits with return code = -11", "crashed"),
        ("[ERROR] [launch.py:341:sigkill_handler] ['python', 'a.py'] exits with return code = -9", "killed"),
        ("subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.", "killed"),
        (f"{_WORKER} Killed.", "killed"),
        ("      Exit Code:    137", "killed"),
        ("srun: error: nid12: task 3: Out Of Memory", "out_of_host_memory"),
        ("Status: Failed  Reason: Evicted  The node was low on resource: memory.", "out_of_host_memory"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", "program_out_of_memory"),
        ("error: *** STEP 7.0 ON n1 CANCELLED AT 2026-05-01T10:00:00 DUE TO TIME LIMIT ***", "job_cancelled"),
        ("error: *** JOB 7 ON n1 CANCELLED AT 2026-05-01T10:00:00 DUE TO NODE FAILURE ***", "job_cancelled"),
        ("Memory access fault by GPU node-2 on address 0x7f. Reason: Unknown.", "amd_gpu_reported"),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "ray_worker_ended"),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to"
         " (10.0.0.1, 29500).", "no_store"),
        ("RuntimeError: The server socket has failed to listen on any local network address. The server socket has"
         " failed to bind to [::]:29500 (errno: 98 - Address already in use).", "store_port_taken"),
        ("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
         "ranks_not_started"),
        ("# Out of bounds values : 12 FAILED", "wrong_sums"),
        ("double free or corruption (!prev)", "heap_corrupted"),
        ("*** Error in `python': free(): invalid pointer: 0x00007fcbb6ab6d80 ***", "heap_corrupted"),
        ("corrupted double-linked list", "heap_corrupted"),
        ("malloc_consolidate(): unaligned fastbin chunk detected", "heap_corrupted"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.", "program_out_of_memory"),
        ("E0 a.cc:3072] Execution failed: DEADLINE_EXCEEDED: GetKeyValue() timed out", "xla_key_missing"),
        ("ionic_comp_msn:1277: cqe with error 12 for qpid 5", "ib_retry"),
        ("[rank12]:[E817 a.cpp:1515] [PG 0 (default_pg) Rank 12] Process group watchdog thread terminated with"
         " exception: CUDA error: uncorrectable ECC error encountered", "ecc"),
    ],
)  # fmt: skip
def test_how_a_process_ended_or_did_not_start(line: str, code: str) -> None:
    """As in NVIDIA/nccl#726, #1050, #1184 and #2186, DeepSpeed#2638, OpenRLHF#1040, torchtune#1025 and training#770."""
    found = findings(_START, line)
    assert {name: f.severity for name, f in found.items() if name != "unknown"} == {code: "error"}


def test_ends_that_only_follow_from_another_are_not_reported() -> None:
    """PyTorch's watchdog aborts the process itself, and a test without a wrong element is none."""
    lines = "Fatal Python error: Aborted", "Signal 6 (SIGABRT) received by PID 5", "# Out of bounds values : 0 OK"
    assert set(findings(_START, *lines)) == {"unknown"}


def test_the_rank_whose_connection_closed_first() -> None:
    """As in sgl-project/sglang#5013; at the end of a healthy run each rank may see another one first."""
    closed = [told("[Service thread] Connection closed by localRank 7", pid=pid, device=pid) for pid in (3, 4, 5)]
    later = told("[Service thread] Connection closed by localRank 5", pid=4, device=4)
    assert "on a local rank 7 ended before the others" in findings(*closed, later)["closed_first"].what
    assert "closed_first" not in findings(closed[0])
    assert "closed_first" not in findings(later, *closed)


def test_ranks_of_which_one_names_its_group_are_compared() -> None:
    """As in rmaphoh/RETFound#39, where one rank reduced a metric and the other its gradients."""
    error = (
        "[rank{0}]:[E ProcessGroupNCCL.cpp:563] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=5769, OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, Timeout(ms)=600000) ran for 600063 milliseconds"
    )
    at = "Timeout at NCCL work: 5769, last enqueued NCCL work: 5769, last completed NCCL work: 5768."
    named = f"[rank0]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 0] {at}"
    found = findings(error.format(0, 1), error.format(1, 2958336), named)["collective_timeout"]
    assert "the same number with different operations or sizes" in found.why


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


@pytest.mark.parametrize(
    ("place", "text", "code", "severity"),
    [
        ("a.cc:1", "NCCL/NET (shim) mismatch enforced: NCCL_BUFFSIZE=1 (expected 8388608)", "google_settings", "error"),
        ("a.cc:1", "NCCL/NET (shim) mismatch recommended: NCCL_ALGO=Ring (expected unset)", "google_advice", "warning"),
        (
            "a.cc:1",
            "NET/FasTrak a.cc:1: INVALID_ARGUMENT: no valid fd set.",
            "google_plugin",
            "error",
        ),
        ("net_fastsocket.cc:765", "Cannot get incoming CPU.", "fast_socket", "note"),
        ("tcpxResult_t tcpxCommProgress(tcpxComm*):1231", "0xa:0xb rx rx ctrl timeout cnt 7", "tcpx_waits", "warning"),
        (
            "int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):418",
            "NET/OFI aws-ofi-nccl initialization failed",
            "no_efa",
            "note",
        ),
        ("plugin/net.cc:306", "Failed to initialize any NET plugin", "no_network", "error"),
        ("init.cc:2095", "MSCCL++: Feature not enabled. ENABLE_MSCCLPP must be defined", "mscclpp", "note"),
        ("rccl_wrap.cc:9", "LL cutoff points not detected for a supported arch gfx950", "ll_limits", "note"),
        ("misc/ibvwrap.cc:173", "lib wrapper not initialized.", "unused_ibverbs", "note"),
        (
            "misc/socket.cc:484",
            "socketFinalizeAccept: wrong magic 74656d2f20544547 != 7970663b906d70b9",
            "stranger_at_port",
            "error",
        ),
        (
            "misc/socket.cc:484",
            "socketFinalizeAccept: wrong magic 100010002010316 != 7970663b906d70b9",
            "stranger_at_port",
            "error",
        ),
        (
            "misc/socket.cc:484",
            "socketFinalizeAccept: wrong magic 7970663b906d70b8 != 7970663b906d70b9",
            "wrong_socket",
            "error",
        ),
        ("transport.cc:154", "Cuda failure 'invalid argument'", "connection_setup_refused", "error"),
        ("transport/generic.cc:19", "Cuda failure 1 'invalid argument'", "cuda_failure", "error"),
        ("ucx_plugin.c:539", "Failed: UCX error ucx_plugin.c:539 '-5' Invalid parameter", "ucx", "error"),
    ],
)
def test_warnings_of_plugins(place: str, text: str, code: str, severity: str) -> None:
    """Google documents those of its plugins; others as in nccl-fastsocket#4, NVIDIA/nccl#1652, #1175 and #1808."""
    log = read(f"vm-0:606:642 [ 6 ] {place} NCCL WARN {text}")
    assert [(warning.host, warning.place) for warning in log.warnings] == [("vm-0", place)]
    found = findings(f"vm-0:606:642 [6] {place} NCCL WARN {text}")
    assert found[code].severity == severity


def test_the_last_error_is_explained_by_the_place_of_its_warning() -> None:
    """As in pytorch#150852: PyTorch repeats the text alone, which was a second error, with advice on kernels."""
    warning = "a:7:8 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"
    last = "[rank0]: Last error:", "[rank0]: Cuda failure 1 'invalid argument'"
    assert set(findings(*last)) == {"cuda_failure"}
    assert set(findings(warning, *last)) == {"nvls"}


def test_places_that_a_chat_has_made_links() -> None:
    linked = "[net_ib.cc](http://net_ib.cc)"
    log = read(told(f"{linked}:910 -> 2"), f"a:7:8 [0] transport/{linked}:1295 NCCL WARN Got completion from peer")
    [process] = log.processes
    assert (process.host, process.failed_at and process.failed_at.value) == ("a", "net_ib.cc:910 -> 2")
    assert log.warnings[0].place == "transport/net_ib.cc:1295"


def test_ncclx_names_a_thread_behind_the_device_and_warns_of_errors_that_it_passes_on() -> None:
    """As in meta-pytorch/torchcomms#523: the second is no warning without an explanation."""
    head = "W0202 17:44:47.289833 120755 a.cc:1] pcl-kini02:120755:120756 [1][main] NCCL WARN"
    log = read(f"{head} Call to ibv_create_qp failed", f"{head} /__w/comms/v2.28-a/transport/net_ib.cc:852 -> 3")
    [process] = log.processes
    assert (process.host, process.pid, process.failed_at is not None) == ("pcl-kini02", 120755, True)
    assert [warning.text for warning in log.warnings] == ["Call to ibv_create_qp failed"]
