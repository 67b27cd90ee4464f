"""AllRanks: gathers `CommTimeMonitor`'s numbers from all ranks.

The watches recognize by the name of this module that a thread in it waits for other ranks.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.sync.groups import BorrowedGroups

_POLL_S = 0.001  # short compared with a step, which is delayed while a matrix is late


class AllRanks:
    """Gathers matrices ``(num_steps, num_quantities)`` from all ranks, without stopping any of them.

    The ``groups`` are from `gathering_group`; None for a single rank.

    Attributes:
        is_over: whether `give_up` was called.
    """

    def __init__(self, groups: BorrowedGroups | None, shape: tuple[int, int]) -> None:
        self._groups = groups
        self._group = None if groups is None else groups.all_ranks
        self._shape = shape
        self._work: dist.Work | None = None
        self._gathered: list[Tensor] = []
        self.is_over = False

    @property
    def is_free(self) -> bool:
        """Whether a matrix can be sent, because the last one has arrived and was taken."""
        return not self._gathered

    def close(self) -> None:
        """Returns the groups, unless ranks may be out of step."""
        if self._groups is not None and not self.is_over:
            self._groups.return_to_pool()

    def give_up(self) -> None:
        """Drops the matrix that is under way. Nothing may be sent afterwards, since the ranks may be out of step."""
        self.is_over, self._gathered, self._work = True, [], None

    def send(self, rows: Tensor) -> None:
        """Starts to gather ``rows`` ``(n, num_quantities)``; missing rows are NaN. All ranks must call it."""
        assert self.is_free
        assert not self.is_over
        # The device is named because a program may have set another default.
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

        The result is ``(world_size, n, num_quantities)``, with the rows that all ranks have.

        Raises:
            RuntimeError: the collective has failed.
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
