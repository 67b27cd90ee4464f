"""One bench on one rank: joins the process group, measures, and describes the machine.

If the command starts its ranks itself, each rank runs this module with a file that describes the job. Under torchrun
and srun, each rank runs the command.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import statistics
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commopt_diagnose.bench.measure import measure, reduce_value
from commopt_diagnose.bench.result import BenchResult
from commopt_diagnose.bench.settings import BenchSettings
from commopt_diagnose.bench.start import PROGRESS, OnProgress
from commopt_diagnose.doctor.meeting import MeetingError, check_port
from commopt_diagnose.rank_identity import RankIdentity, find_rank_identity
from lightning_commopt.measure.runs.machine import devices, nccl_version, versions
from lightning_commopt.sync.groups import let_gloo_finish_at_exit
from lightning_commopt.text.validation import check_choice

_TIMEOUT = timedelta(minutes=30)
_MEETING_S = 300.0  # a slow file system may keep the first rank that long behind the others
_CPU_RANKS = 2  # the fewest ranks that communicate
_NUM_WARMUPS = 2  # copies before those that are timed
_NUM_COPIES = 10  # the median of so few ignores a disturbed one
_MAX_COPY_BYTES = 2**28  # larger copies are no faster, and the other ranks' buffers fill the GPUs


def run_job(
    settings: BenchSettings,
    identity: RankIdentity,
    *,
    device_type: str,
    on_progress: OnProgress,
    notes: Mapping[str, Any] | None = None,
    init_method: str = "env://",
) -> BenchResult:
    """Measures as one of the ranks; all of them must call it, in a process without a process group.

    Ranks on "cpu" communicate over gloo, on "cuda" over NCCL. ``notes`` are further entries of `BenchResult.where`,
    such as the link's rate; ``init_method`` is passed to ``init_process_group``.

    Returns:
        The result, on every rank.

    Raises:
        ValueError: a setting does not fit these ranks.
        MeetingError: the ranks cannot meet, or gloo cannot start.
    """
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", identity.local_rank % torch.cuda.device_count()) if is_cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if is_cuda:
        torch.cuda.set_device(device)
    let_gloo_finish_at_exit()
    if init_method == "env://" and not identity.hosts_store:
        check_port(identity.address, identity.port, limit_s=_MEETING_S)  # torch would go on trying for `_TIMEOUT`
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            init_method=init_method,
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=_TIMEOUT,
        )
    except RuntimeError as error:
        # Errors of gloo begin with a place in its source.
        reason = re.sub(r"^\[enforce fail at [^\]]*\] ", "", str(error).partition("\n")[0])
        raise MeetingError(f"the ranks cannot meet: {reason}; commopt doctor looks for causes") from error
    try:
        load_at_start, started_at = os.getloadavg()[0], datetime.now().astimezone()
        ranks_per_node = int(reduce_value(identity.ranks_per_node, dist.ReduceOp.MIN))  # ranks must agree on it
        rows = measure(settings, device, ranks_per_node, on_progress)
        peers = copy_between_gpus(max(settings.sizes_bytes)) if is_cuda and identity.rank == 0 else []
        where = {
            **_describe_machine(device, ranks_per_node),
            "started_at": started_at.isoformat(timespec="seconds"),
            "seconds": round((datetime.now().astimezone() - started_at).total_seconds(), 1),
            "load_at_start": load_at_start,
            "load_at_end": os.getloadavg()[0],
            **(notes or {}),
        }
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return BenchResult(rows=tuple(rows), where=where, settings=settings.to_dict(), peer_copies=peers)


def _describe_machine(device: torch.device, ranks_per_node: int) -> dict[str, Any]:
    name = devices()[0]["name"] if device.type == "cpu" else torch.cuda.get_device_name(device)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (socket.gethostname(), name))
    return {
        "hosts": list(dict.fromkeys(host for host, _ in everywhere)),
        "devices": list(dict.fromkeys(device_name for _, device_name in everywhere)),
        "device_type": device.type,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": "gloo" if device.type == "cpu" else f"nccl {nccl_version()}",
        "world_size": dist.get_world_size(),
        "num_nodes": max(1, dist.get_world_size() // ranks_per_node),
        "versions": versions(),
        "platform": platform.platform(),
    }


def copy_between_gpus(num_bytes: int) -> list[list[float | None]]:
    """Returns bytes per second from each GPU (row) to each other GPU (column), in the median of 10 copies.

    A copy has ``num_bytes``, but at most 256 MiB. The diagonal is None. The list is empty with fewer
    than two GPUs, and if other ranks have their GPUs for themselves (compute mode) or have filled them.
    """
    num_gpus, num_bytes = torch.cuda.device_count(), min(num_bytes, _MAX_COPY_BYTES)
    if num_gpus < 2:
        return []
    try:
        buffers = [torch.ones(num_bytes, dtype=torch.uint8, device=f"cuda:{index}") for index in range(num_gpus)]
        return [
            [None if source == target else _rate(buffers[source], buffers[target]) for target in range(num_gpus)]
            for source in range(num_gpus)
        ]
    except RuntimeError:
        return []  # what was measured before must not be lost


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    times_s: list[float] = []
    with torch.cuda.device(source.device):
        for number in range(_NUM_WARMUPS + _NUM_COPIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            if number >= _NUM_WARMUPS:
                times_s.append(start.elapsed_time(end) / 1e3)
    return source.numel() / statistics.median(times_s)


def main() -> None:
    """Reads the job and measures; rank 0 writes the result to the job's file."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    identity = find_rank_identity()
    assert identity is not None

    def print_progress(num_done: int, total: int, label: str) -> None:
        if identity.rank == 0:
            print(PROGRESS + json.dumps([num_done, total, label]), flush=True)

    try:
        result = run_job(
            BenchSettings(**job["settings"]),
            identity,
            device_type=job["device_type"],
            on_progress=print_progress,
            notes=job["notes"],
            init_method=f"file://{job['store']}",
        )
    except MeetingError as error:
        sys.exit(str(error))
    if identity.rank == 0:
        result.save(Path(job["result"]))


def device_type_of(device: str) -> tuple[str, int]:
    """Returns the type of device, and the default number of ranks on a host; "auto" is CUDA with at least two devices.

    Raises:
        ValueError: the device is unknown, or there is none of its type.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        raise ValueError("--device cuda: torch finds no CUDA device here")
    if device == "cuda" or num_gpus > 1:
        return "cuda", num_gpus
    return "cpu", _CPU_RANKS


def _num_gpus_of_host() -> int:
    """Returns the number of GPUs that the ranks of this host have together; 0 if this rank sees none."""
    num_seen, of_step = torch.cuda.device_count(), os.environ.get("SLURM_GPUS_ON_NODE", "")
    is_of_srun = not os.environ.get("RANK") and of_step.isdecimal()
    return max(num_seen, int(of_step)) if num_seen and is_of_srun else num_seen


def bench_launched(
    settings: BenchSettings, identity: RankIdentity, *, device: str, on_progress: OnProgress
) -> BenchResult | None:
    """Measures as one of the ranks that a launcher has started; the result on rank 0, None on the others.

    The device "auto" is CUDA if each rank has one, which may be the only one that SLURM shows it.

    Raises:
        ValueError: a setting does not fit these ranks.
        MeetingError: the ranks cannot meet.
    """
    if device == "auto":
        device = "cuda" if _num_gpus_of_host() >= identity.ranks_per_node else "cpu"
    device_type, _ = device_type_of(device)
    os.environ |= {"MASTER_ADDR": identity.address, "MASTER_PORT": str(identity.port)}  # srun leaves them unset
    result = run_job(settings, identity, device_type=device_type, on_progress=on_progress)
    return result if identity.rank == 0 else None


if __name__ == "__main__":
    main()
