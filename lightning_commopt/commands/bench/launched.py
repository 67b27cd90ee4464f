"""A bench on ranks that torchrun or srun has started: every one of them runs the command."""

from __future__ import annotations

import os

import torch

from lightning_commopt.commands.bench.job import run_job
from lightning_commopt.commands.bench.start import OnProgress
from lightning_commopt.launch.rank_identity import RankIdentity
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings
from lightning_commopt.text.validation import check_choice

_CPU_RANKS = 2


def device_type_of(device: str) -> tuple[str, int]:
    """Returns the type of device, and the default number of ranks on a host.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there are at least two devices.

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


def bench_launched(
    settings: BenchSettings, identity: RankIdentity, *, device: str, on_progress: OnProgress
) -> BenchResult | None:
    """Measures as one of the ranks that a launcher has started; the result on rank 0, None on the others.

    The device "auto" is CUDA if each rank has one.

    Raises:
        ValueError: a setting does not fit these ranks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= identity.ranks_per_node else "cpu"
    device_type, _ = device_type_of(device)
    os.environ |= {"MASTER_ADDR": identity.address, "MASTER_PORT": str(identity.port)}  # srun leaves them unset
    result = run_job(settings, identity, device_type=device_type, on_progress=on_progress)
    return result if identity.rank == 0 else None
