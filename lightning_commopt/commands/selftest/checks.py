"""Where the ranks of the self-test can run, and the list of what it checks, which `laws` and `on_device` fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DEVICES = ("auto", "cpu", "cuda")
_NCCL_THAT_SHARES_A_GPU = (2, 30)


@dataclass(frozen=True, kw_only=True)
class TestDevices:
    """Devices and backend of two ranks."""

    name: str  # as the table shows it
    device_type: str  # "cpu" or "cuda"
    backend: str  # of the process group
    indices: tuple[int, int] = (0, 0)  # of each rank's CUDA device
    # Variables of each rank, by its number as text, that must be set before the group is made
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    ends_at: float = math.inf  # ranks that have not answered by this value of time.monotonic() are ended

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", self.indices[rank])


CPU = TestDevices(name="2 ranks on the CPU, gloo", device_type="cpu", backend="gloo")


def candidates(device: str) -> list[TestDevices]:
    """Returns where two ranks may run, the best first; whether NCCL takes two ranks on one GPU shows when it is tried.

    Raises:
        ValueError: the device is none of `DEVICES`, or there is none of its kind.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device=cuda: torch finds no CUDA device here")
    if device == "cpu" or num_gpus == 0:
        return [CPU]
    gloo = replace(CPU, name="2 ranks on one GPU, gloo", device_type="cuda")
    if not dist.is_nccl_available():
        return [gloo]
    nccl = replace(gloo, name="2 ranks on one GPU, NCCL", backend="cpu:gloo,cuda:nccl")
    if num_gpus > 1:
        return [replace(nccl, name="2 ranks on 2 GPUs, NCCL", indices=(0, 1)), gloo]
    # NCCL refuses two ranks with one GPU of one host, unless sharing is enabled, or they seem to be on two hosts.
    as_hosts = {str(rank): {"NCCL_HOSTID": f"host{rank}"} for rank in range(2)}
    places = [replace(nccl, name="2 ranks on one GPU as 2 hosts, NCCL over sockets", environment=as_hosts), gloo]
    if torch.cuda.nccl.version() >= _NCCL_THAT_SHARES_A_GPU:
        shared = {str(rank): {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for rank in range(2)}
        places.insert(0, replace(nccl, environment=shared))
    return places


class NotChecked(Exception):  # noqa: N818 (no error)
    """What is missing here for a check."""


class Found(NamedTuple):
    """What came of a check that measures."""

    detail: str  # in words
    numbers: dict[str, Any]  # by name, for the JSON


Runner = Callable[[TestDevices], "str | Found"]


@dataclass(frozen=True)
class Check:
    """One line of the self-test."""

    name: str  # what holds
    run: Runner  # returns what was checked
    is_extra: bool = False  # for ``--full`` only
    is_on_ranks: bool = True  # runs on every rank; else in the command's process, and starts ranks itself


CHECKS: list[Check] = []


def check(
    name: str, *, is_extra: bool = False, is_on_ranks: bool = True, needs_cuda: bool = False
) -> Callable[[Runner], Runner]:
    """Adds a function to `CHECKS`. It raises an AssertionError that says what is wrong, or `NotChecked`."""

    def add(run: Runner) -> Runner:
        def run_where_possible(place: TestDevices) -> str | Found:
            if needs_cuda and place.device_type == "cpu":
                raise NotChecked("no CUDA device")
            return run(place)

        CHECKS.append(Check(name, run_where_possible, is_extra, is_on_ranks))
        return run

    return add
