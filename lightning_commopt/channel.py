"""Collectives over one process group, with a count of the bytes."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
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
        rank: of this process in the group.
        within: the ranks of this node, if the group was cut into nodes.
        across: the ranks of all nodes that have this rank's place in theirs, if the group was cut into nodes.
    """

    def __init__(self, group: dist.ProcessGroup, within: Channel | None = None, across: Channel | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.within = within
        self.across = across
        self._half_bytes_sent = 0

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to collectives so far, in terms of an all-reduce.

        An all-to-all and an all-gather move half of what an all-reduce of the same size moves: they count half.
        """
        parts = sum(part.bytes_sent for part in (self.within, self.across) if part is not None)
        return self._half_bytes_sent // 2 + parts

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum ``tensor`` over the ranks, in place.

        Args:
            tensor: any shape and dtype that the group's backend sums; dense, or sparse where the backend can.
        """
        values = tensor._values() if tensor.is_sparse else tensor
        self._half_bytes_sent += 2 * values.nbytes
        return Pending(tensor, dist.all_reduce(tensor, group=self._group, async_op=True))

    def all_to_all(self, message: Tensor) -> Pending:
        """Starts to send row ``i`` of ``message`` to rank ``i``; its row ``i`` becomes the result's row of this rank.

        Args:
            message: ``(W, s)`` of any dtype, contiguous.
        """
        self._half_bytes_sent += message.nbytes
        received = torch.empty_like(message)
        work = dist.all_to_all_single(_as_bytes(received), _as_bytes(message), group=self._group, async_op=True)
        return Pending(received, work)

    def all_gather(self, part: Tensor) -> Pending:
        """Starts to send ``part`` to all ranks; the result ``(W, s)`` has one row of each.

        Args:
            part: ``(s,)`` of any dtype, contiguous.
        """
        gathered = part.new_empty(self.size, part.numel())
        self._half_bytes_sent += gathered.nbytes
        work = dist.all_gather_into_tensor(_as_bytes(gathered), _as_bytes(part), group=self._group, async_op=True)
        return Pending(gathered, work)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view that any backend can send; ``(n,)``."""
    return tensor.view(-1).view(torch.uint8)
