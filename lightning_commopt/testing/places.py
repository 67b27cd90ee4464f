"""Where ranks can run on this machine: on which devices, and with which backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

DEVICES = ("auto", "cpu", "cuda")
_NCCL_THAT_SHARES_A_GPU = (2, 30)  # the first version with NCCL_MULTI_RANK_GPU_ENABLE


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices and backend of some ranks."""

    name: str  # name in tables and errors
    device_type: str  # "cpu" or "cuda"
    backend: str  # backend of the process group
    indices: tuple[int, ...] = (0, 0)  # index of each rank's CUDA device; its length is the number of ranks
    # Environment variables of each rank, by its number as text. They must be set before the group is made.
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    timeout_s: float = 60  # time limit of a collective; ranks are late by seconds at most
    ends_at: float = math.inf  # value of time.monotonic() at which ranks without an answer are ended

    @property
    def num_ranks(self) -> int:
        return len(self.indices)

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", self.indices[rank])


CPU = Place(name="2 ranks on the CPU, gloo", device_type="cpu", backend="gloo")


def candidates(device: str, num_ranks: int = 2) -> list[Place]:
    """Returns where ranks may run, the best place first; whether NCCL lets them share a GPU shows when it is tried.

    Args:
        device: one of `DEVICES`; "auto" is CUDA where there is a device.
        num_ranks: how many ranks.

    Raises:
        ValueError: the device is none of `DEVICES`, or there is none of its kind.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device=cuda: torch finds no CUDA device here")
    cpu = replace(CPU, name=f"{num_ranks} ranks on the CPU, gloo", indices=(0,) * num_ranks)
    if device == "cpu" or num_gpus == 0:
        return [cpu]
    gloo = replace(cpu, name=f"{num_ranks} ranks on one GPU, gloo", device_type="cuda")
    if not dist.is_nccl_available():
        return [gloo]
    nccl = replace(gloo, name=f"{num_ranks} ranks on one GPU, NCCL", backend="cpu:gloo,cuda:nccl")
    if num_gpus >= num_ranks:
        name = f"{num_ranks} ranks on {num_ranks} GPUs, NCCL"
        return [replace(nccl, name=name, indices=tuple(range(num_ranks))), gloo]
    # NCCL refuses two ranks with one GPU of one host, unless sharing is enabled, or they seem to be on several hosts.
    as_hosts = {str(rank): {"NCCL_HOSTID": f"host{rank}"} for rank in range(num_ranks)}
    name = f"{num_ranks} ranks on one GPU as {num_ranks} hosts, NCCL over sockets"
    places = [replace(nccl, name=name, environment=as_hosts), gloo]
    if torch.cuda.nccl.version() >= _NCCL_THAT_SHARES_A_GPU:
        shared = {str(rank): {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for rank in range(num_ranks)}
        places.insert(0, replace(nccl, environment=shared))
    return places
