"""How processes end: what is the cause of it, and what only follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from commopt_diagnose.nccl_log.reader import read_log
from diagnose_support.nccl_sample_logs import findings, told

_START = told("Bootstrap : Using eth0:10.0.0.1<0>")


_WORKER = "RuntimeError: DataLoader worker (pid 4821) is killed by signal:"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("[cf0b62962198:378934:0:382579] Caught signal 7 (Bus error: nonexistent physical address)", "bus_error"),
        ("srun: error: nid12: tasks 0-3: Bus error (core dumped)", "bus_error"),
        (f"{_WORKER} Bus error. It is possible that dataloader's workers are out of shared memory.", "bus_error"),
        ("./run.sh: line 3: 12345 Bus error               (core dumped) python train.py", "bus_error"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
         "bus_error"),
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
        ("HW Exception by GPU node-4 (Agent handle: 0x1ebc04e0) reason :GPU Hang", "amd_gpu_reported"),
        ("n1.hsn.example.com: rank 25 died from signal 9", "killed"),
        ("n1.hsn.example.com: rank 25 died from signal 11 and dumped core", "crashed"),
        ("=   KILLED BY SIGNAL: 7 (Bus error)", "bus_error"),
        ("=   KILLED BY SIGNAL: 11 (Segmentation fault)", "crashed"),
        ("W0 1 torch/distributed/elastic/agent/server/api.py:719] Received Signals.SIGTERM death signal, shutting down"
         " workers", "launcher_ended"),
        ("WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers",
         "launcher_ended"),
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 76 got signal: 15", "launcher_ended"),
        ("=>> PBS: job killed: walltime 3611 exceeded limit 3600", "job_cancelled"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "job_cancelled"),
        ("(raylet) node_manager.cc:3049: 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers",
         "out_of_host_memory"),
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
    """PyTorch's watchdog aborts its process, Hydra kills all ranks, and a test without a wrong element is none."""
    lines = "Fatal Python error: Aborted", "Signal 6 (SIGABRT) received by PID 5", "# Out of bounds values : 0 OK"
    more = (
        "=   KILLED BY SIGNAL: 9 (Killed)",
        "0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers",
    )
    assert set(findings(_START, *lines, *more)) == {"unknown"}


def test_that_torchrun_was_told_to_end_follows_from_an_error_or_a_timeout() -> None:
    ended = "SignalException: Process 76 got signal: 15"
    assert findings(_START, ended, "NVRM: Xid (PCI:0000:18:00): 79")["launcher_ended"].severity == "note"
    timeout = (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=1,"
        " NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
    )
    assert findings(_START, timeout, ended)["launcher_ended"].severity == "note"


@pytest.mark.parametrize(
    "advice",
    [
        "WARNING: set --shm-size to at least 8g to avoid bus errors in workers of the data loader",
        "INFO: tip: if you see a bus error, increase /dev/shm",
        "Upgraded tokenizers, which fixes a segmentation fault in fast tokenizers",
    ],
)
def test_words_about_a_crash_are_none(advice: str) -> None:
    """If it fails, what a program advises at each start is reported as the reason why it ended."""
    assert set(findings(_START, advice)) == {"unknown"}


def test_the_rank_whose_connection_closed_first() -> None:
    """As in sgl-project/sglang#5013; at the end of a healthy run each rank may see another one first."""
    closed = [told("[Service thread] Connection closed by localRank 7", pid=pid, device=pid) for pid in (3, 4, 5)]
    later = told("[Service thread] Connection closed by localRank 5", pid=4, device=4)
    assert "on a local rank 7 ended before the others" in findings(*closed, later)["closed_first"].what
    assert "closed_first" not in findings(closed[0])
    assert "closed_first" not in findings(later, *closed)


def test_a_log_without_nccl_is_none_because_of_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("CUDA out of memory. Tried to allocate 2 GiB\nexitcode: -9 (pid: 7)\n")
    with pytest.raises(ValueError, match="no line of NCCL"):
        read_log([path])
