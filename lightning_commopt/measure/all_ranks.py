"""Gathers what every rank measured on every rank, in one small message beside the training."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.measure.recorder import issued_by

_POLL_S = 0.001


class AllRanks:
    """Gathers matrices of one shape from all ranks, one after another, without stopping any of them.

    Args:
        group: of the ranks, over CPU; None for a single rank.
        shape: ``(num_steps, num_quantities)`` of a matrix.
    """

    def __init__(self, group: dist.ProcessGroup | None, shape: tuple[int, int]) -> None:
        self._group = group
        self._shape = shape
        self._work: dist.Work | None = None
        self._gathered: list[Tensor] = []

    @property
    def is_free(self) -> bool:
        """Whether a matrix can be sent: the last one has arrived and was taken."""
        return not self._gathered

    def send(self, rows: Tensor) -> None:
        """Starts to gather; all ranks must call it, at any time.

        Args:
            rows: ``(n, num_quantities)`` float64; with fewer rows than the shape has, the last ones count as missing.
        """
        assert self.is_free
        matrix = torch.full(self._shape, torch.nan, dtype=torch.float64, device="cpu")
        matrix[: len(rows)] = rows.reshape(-1, self._shape[1])
        if self._group is None:
            self._gathered = [matrix]
            return
        self._gathered = [torch.empty_like(matrix) for _ in range(dist.get_world_size(self._group))]
        with issued_by("CommTimeMonitor"):
            self._work = dist.all_gather(self._gathered, matrix, group=self._group, async_op=True)

    def take(self, limit_s: float = 0.0) -> Tensor | None:
        """Returns the gathered matrices, once; None if they have not arrived within ``limit_s`` seconds.

        Returns:
            ``(world_size, n, num_quantities)`` float64, the rows that all ranks have.

        Raises:
            RuntimeError: the collective failed.
        """
        deadline = time.monotonic() + limit_s
        while self._work is not None and not self._work.is_completed():
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        if not self._gathered:
            return None
        if self._work is not None:
            self._work.wait()
        values = torch.stack(self._gathered)
        self._gathered, self._work = [], None
        return values[:, ~values.isnan().all(dim=2).any(dim=0)]
