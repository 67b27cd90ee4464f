"""Plain copies between all pairs of this host's GPUs: which pair is joined by which link."""

from __future__ import annotations

import statistics

import torch

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
