"""A bench on ranks that torchrun or srun has started: every one of them runs the command."""

from __future__ import annotations

import os

import torch

from lightning_commopt.commands.bench.job import RankPlace, run_job
from lightning_commopt.commands.bench.measure import OnProgress
from lightning_commopt.launch.environment import num_started_ranks
from lightning_commopt.measure.link.bench_result import BenchResult
from lightning_commopt.measure.link.bench_settings import BenchSettings
from lightning_commopt.text.validation import check_choice

_CPU_RANKS = 2


def is_launched() -> bool:
    """Returns whether this process is one of several ranks that torchrun or srun has started."""
    return num_started_ranks() > 1


def device_type_of(device: str) -> tuple[str, int]:
    """Returns the kind of device, and how many ranks a host has if nobody says.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there are two devices at least.

    Raises:
        ValueError: the device is unknown, or there is none of its kind.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    num_gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and num_gpus == 0:
        raise ValueError("--device cuda: torch finds no CUDA device here")
    if device == "cuda" or num_gpus > 1:
        return "cuda", num_gpus
    return "cpu", _CPU_RANKS


def bench_launched(settings: BenchSettings, *, device: str, on_progress: OnProgress) -> BenchResult | None:
    """Measures as one of the ranks that a launcher has started.

    Args:
        settings: what to measure.
        device: see `device_type_of`; "auto" takes CUDA where each rank has a device.
        on_progress: called before each block.

    Returns:
        The result on rank 0; None on the others.

    Raises:
        ValueError: a setting does not fit these ranks, or the launcher does not say where ranks meet.
    """
    place = _place()
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= place.ranks_per_node else "cpu"
    device_type, _ = device_type_of(device)
    result = run_job(settings, place, device_type=device_type, on_progress=on_progress)
    return result if place.rank == 0 else None


def _place() -> RankPlace:
    if "RANK" in os.environ:
        missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(f"RANK is set, but not {', '.join(missing)}: start the ranks with torchrun or srun")
        return RankPlace.from_environment(os.environ)
    from lightning.fabric.plugins.environments import SLURMEnvironment

    try:
        slurm = SLURMEnvironment(auto_requeue=False)
        os.environ.setdefault("MASTER_ADDR", slurm.main_address)
        os.environ.setdefault("MASTER_PORT", str(slurm.main_port))
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"srun: {' '.join(str(error).split())}") from None
    num_nodes = int(os.environ.get("SLURM_NNODES", "1"))
    world_size = num_started_ranks()
    return RankPlace(
        rank=int(os.environ["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(os.environ.get("SLURM_LOCALID", "0")),
        ranks_per_node=max(1, world_size // num_nodes),
        init_method="env://",
    )
