"""One bench on one rank: joins the process group, measures, and says where and when."""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_commopt.commands.bench.measure import OnProgress, measure
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings
from lightning_commopt.measure.runs.machine import devices, nccl_version, versions
from lightning_commopt.sync.groups import let_gloo_finish_at_exit

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank this process is.

    Attributes:
        rank: its number.
        world_size: number of ranks.
        local_rank: its number on its node.
        ranks_per_node: how many ranks its node has.
        init_method: where ranks find each other, as ``init_process_group`` takes it.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    init_method: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], init_method: str = "env://") -> RankPlace:
        world_size = int(environment["WORLD_SIZE"])
        return cls(
            rank=int(environment["RANK"]),
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            ranks_per_node=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
            init_method=init_method,
        )


def run_job(
    settings: BenchSettings,
    place: RankPlace,
    *,
    device_type: str,
    on_progress: OnProgress,
    notes: Mapping[str, Any] | None = None,
) -> BenchResult:
    """Measures as one of the ranks; all of them must call it, in a process without a process group.

    Args:
        settings: what to measure.
        place: which rank this is.
        device_type: "cpu", over gloo, or "cuda", over NCCL.
        on_progress: see `measure`.
        notes: further entries of `BenchResult.where`, such as the link's rate.

    Returns:
        The result, on every rank.

    Raises:
        ValueError: a setting does not fit these ranks.
    """
    is_cuda = device_type == "cuda"
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if is_cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if is_cuda:
        torch.cuda.set_device(device)
    let_gloo_finish_at_exit()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=_TIMEOUT,
    )
    try:
        load_at_start, started_at = os.getloadavg()[0], datetime.now().astimezone()
        rows = measure(settings, device, place.ranks_per_node, on_progress)
        peers = copy_between_gpus(max(settings.sizes_bytes)) if is_cuda and place.rank == 0 else []
        where = {
            **_facts(device, place),
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


def _facts(device: torch.device, place: RankPlace) -> dict[str, Any]:
    name = devices()[0].name if device.type == "cpu" else torch.cuda.get_device_name(device)
    everywhere: list[Any] = [None] * place.world_size
    dist.all_gather_object(everywhere, (socket.gethostname(), name))
    return {
        "hosts": list(dict.fromkeys(host for host, _ in everywhere)),
        "devices": list(dict.fromkeys(device_name for _, device_name in everywhere)),
        "device_type": device.type,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": "gloo" if device.type == "cpu" else f"nccl {nccl_version()}",
        "world_size": place.world_size,
        "num_nodes": max(1, place.world_size // place.ranks_per_node),
        "versions": versions(),
        "platform": platform.platform(),
    }


_NUM_WARMUPS = 2
_NUM_COPIES = 10


def copy_between_gpus(num_bytes: int) -> list[list[float | None]]:
    """Returns bytes a second from each GPU (row) to each other one (column); None on the diagonal.

    Args:
        num_bytes: of a copy.

    Returns:
        The median of 10 copies of each pair; nothing with fewer than two GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        return []
    buffers = [torch.ones(num_bytes, dtype=torch.uint8, device=f"cuda:{index}") for index in range(num_gpus)]
    return [
        [None if source == target else _rate(buffers[source], buffers[target]) for target in range(num_gpus)]
        for source in range(num_gpus)
    ]


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    times_s = []
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
