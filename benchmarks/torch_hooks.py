"""Comm hooks of torch that benchmarks compare ours with, and one that sends nothing."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Returns a future that has its result."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[result.device] if result.is_cuda else None
    )
    future.set_result(result)
    return future


def keep(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gives DDP its own gradients back at once: what the ranks would take if their link cost nothing."""
    return done(bucket.buffer())


def register_no_sync(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, keep)


def register_bf16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)


def register_powersgd(model: DistributedDataParallel, matrix_rank: int) -> None:
    """Registers torch's PowerSGD, which starts as early as torch allows."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
