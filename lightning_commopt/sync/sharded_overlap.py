"""Runs reduce-scatters of CPU tensors on a thread while backward goes on; on CUDA, FSDP2's streams do that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compat.torch import call_after_backward
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.executors import BucketFuture, WorkerThread
from lightning_commopt.sync.groups import BorrowedGroups, borrow_groups, shared_node_groups

_MAX_UNDER_WAY = 2
"""Units whose gradients are in memory at a time, besides the one that backward is at."""


class Channels:
    """The collectives of the units of a model, and the thread that they may run on."""

    def __init__(self) -> None:
        self.overlap: Overlap | None = None  # the thread
        self.ranks_per_node: int | None = None  # with channels within and across nodes of as many consecutive ranks
        self.timeout: timedelta | None = None  # of their collectives; None for the backend's default
        self._of_groups: dict[dist.ProcessGroup, Channel] = {}

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._of_groups.values())

    def of(self, group: dist.ProcessGroup) -> Channel:
        """Returns the collectives over a group. With nodes, all ranks must make the first call for these ranks."""
        if group not in self._of_groups:
            size = self.ranks_per_node
            nodes = () if size is None else shared_node_groups(group, size, self.timeout)
            self._of_groups[group] = Channel(group, *nodes)
        return self._of_groups[group]

    def of_borrowed(self, groups: BorrowedGroups) -> Channel:
        """Returns the collectives over borrowed groups."""
        return self._of_groups.setdefault(groups.all_ranks, Channel(groups.all_ranks, groups.within, groups.across))


class Overlap:
    """A thread for reduce-scatters, with process groups of its own. All ranks must make one at the same time."""

    def __init__(self, groups: list[dist.ProcessGroup], channels: Channels) -> None:
        self._executor = WorkerThread()
        self._borrowed: dict[dist.ProcessGroup, BorrowedGroups] = {
            group: borrow_groups(group, ranks_per_node=channels.ranks_per_node, timeout=channels.timeout)
            for group in groups
        }
        self._channels = {group: channels.of_borrowed(borrowed) for group, borrowed in self._borrowed.items()}
        self._under_way: deque[BucketFuture] = deque()

    def submit(self, task: Callable[[Channel], None], output: Tensor, group: dist.ProcessGroup) -> None:
        """Starts a task that fills ``output`` before this backward ends; waits until few enough are under way.

        Raises what an earlier task has raised, as `wait` does.
        """

        def run() -> None:
            with torch.no_grad():
                task(self._channels[group])

        future = self._executor.future(output)
        self._executor.submit(run, [future])
        self._under_way.append(future)
        try:
            call_after_backward(self.wait)
        except RuntimeError:  # FSDP2 reduces after backward, as asked for
            self.wait()
        while len(self._under_way) > _MAX_UNDER_WAY:
            self._under_way.popleft().future.wait()

    def wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().future.wait()

    def close(self) -> None:
        """Ends the thread, and returns the groups unless ranks may be out of step."""
        self._under_way.clear()
        if self._executor.close():
            for borrowed in self._borrowed.values():
                borrowed.return_to_pool()
