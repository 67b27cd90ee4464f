"""The collectives of a fit: those that are observed, and those that gather measurements from all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compat.collectives import CollectiveHooks, has_collective_hooks
from lightning_commopt.compat.sigterm import around_broadcasts
from lightning_commopt.measure.recorder import StepRecorder, issued_by
from lightning_commopt.sync.groups import BorrowedGroups, borrow_host_group
from lightning_commopt.text.validation import info, warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

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


class CollectiveWatch:
    """Observes the collectives of a fit until `close`, where torch has hooks for that: from 2.14 on.

    The process group must exist.
    """

    def __init__(self, trainer: Trainer, recorder: StepRecorder) -> None:
        self._hooks: CollectiveHooks | None = None
        if not has_collective_hooks():
            info("CommTimeMonitor: before torch 2.14 only gradient sync is observed, and no other collective.")
            return
        is_cpu = trainer.strategy.root_device.type == "cpu"
        self._hooks = CollectiveHooks(recorder.issue, sees_end=is_cpu)
        self._unwrap = around_broadcasts(trainer, _broadcast)

    def update(self) -> None:
        """Observes process groups that were made since the last call."""
        if self._hooks is not None:
            self._hooks.update()

    def close(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
            self._unwrap()


def _broadcast(inner: Callable[[], None]) -> None:
    with issued_by("lightning"):
        inner()


def borrow_gathering_group() -> BorrowedGroups | None:
    """Returns a gloo group of all ranks; None, with a warning, if they cannot connect over gloo."""
    try:
        return borrow_host_group()
    except RuntimeError as error:
        warn(
            f"CommTimeMonitor: the ranks cannot connect over gloo ({error}), so each logs its own times; perhaps"
            " GLOO_SOCKET_IFNAME must name the network device.",
            on_every_rank=True,
        )
        return None
