"""Collectives over one process group, with a count of the bytes."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

# By the default group that they came after.
_twins: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]] = WeakKeyDictionary()
# No twin is ever freed: a gloo group's threads may still hold tensors for a moment and need the GIL to let go of them,
# while the destructor of the group waits for its threads with the GIL held.
_kept: list[dist.ProcessGroup] = []


def twin_group(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns another group of the same ranks, on which a second thread may issue collectives.

    All ranks of ``group`` must call it. The same twin is given out as long as the default group lives.

    Args:
        group: whose ranks.
        timeout: after which a collective raises; None for the backend's default.
    """
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    twins = _twins.setdefault(world, {})
    ranks = dist.get_process_group_ranks(group)
    key = (*ranks, timeout)
    if key not in twins:
        is_world = len(ranks) == dist.get_world_size()
        twin = dist.new_group(ranks, timeout=timeout, use_local_synchronization=not is_world)
        assert isinstance(twin, dist.ProcessGroup)
        twins[key] = twin
        _kept.append(twin)
    return twins[key]


def forget_twin(twin: dist.ProcessGroup) -> None:
    """Sees to it that a group whose ranks are out of step is not given out again."""
    for twins in _twins.values():
        for key in [key for key, group in twins.items() if group is twin]:
            del twins[key]


class Pending:
    """A collective under way."""

    def __init__(self, tensor: Tensor, work: dist.Work | None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        """Returns the result.

        For CPU tensors it blocks until the collective is done. For CUDA tensors over NCCL it only makes the
        current stream wait.
        """
        if self._work is not None:
            self._work.wait()
        return self._tensor


class Channel:
    """The collectives that compressors may use, over one process group.

    Attributes:
        size: number of ranks in the group.
        bytes_sent: payload bytes that this rank has handed to collectives so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum ``tensor`` over the ranks, in place.

        Args:
            tensor: any shape and dtype that the group's backend sums; dense, or sparse where the backend can.
        """
        values = tensor._values() if tensor.is_sparse else tensor
        self.bytes_sent += values.numel() * values.element_size()
        return Pending(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))
