"""Collectives over one process group, with a count of the bytes."""

from __future__ import annotations

import atexit
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# By the default group that they came after.
_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]] = WeakKeyDictionary()
# No group is ever freed: gloo's threads may still hold tensors for a moment and need the GIL to let go of them, while
# the destructor of the group waits for its threads with the GIL held.
_kept: list[dist.ProcessGroup] = []
_LAST_MOMENT_S = 0.05


@cache
def let_gloo_finish_at_exit() -> None:
    """Has the process wait a moment when it ends, once.

    gloo's threads let go of the last collective's tensors a little after it is done, and need the GIL for that. A
    thread that asks for it when the interpreter is already being taken down brings the process to an abort, or a halt.
    """
    atexit.register(time.sleep, _LAST_MOMENT_S)


def leave_process_group() -> None:
    """Destroys the default group, so that another can be made."""
    if dist.is_initialized():
        _kept.append(_default_group())
        dist.destroy_process_group()


def twin_group(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns another group of the same ranks, on which a second thread may issue collectives.

    All ranks of ``group`` must call it. The same twin is given out as long as the default group lives.

    Args:
        group: whose ranks.
        timeout: after which a collective raises; None for the backend's default.
    """
    return _subgroup(dist.get_process_group_ranks(group), timeout)


def group_beside() -> dist.ProcessGroup:
    """Returns a gloo group of all ranks for small messages of the host, which nothing else waits for.

    All ranks must call it. The same group is given out as long as the default group lives.
    """
    return _subgroup(list(range(dist.get_world_size())), None, "gloo")


def node_channel(group: dist.ProcessGroup, ranks_per_node: int, timeout: timedelta | None) -> Channel:
    """Returns a channel over ``group`` that is cut into nodes of consecutive ranks. All ranks must call it.

    Args:
        group: whose ranks.
        ranks_per_node: divides the number of ranks.
        timeout: see `twin_group`.
    """
    ranks, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    first = place - place % ranks_per_node
    within = _subgroup(ranks[first : first + ranks_per_node], timeout)
    across = _subgroup(ranks[place % ranks_per_node :: ranks_per_node], timeout)
    return Channel(group, Channel(within), Channel(across))


def _subgroup(ranks: list[int], timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    subgroups = _subgroups.setdefault(_default_group(), {})
    key = (*ranks, timeout, backend)
    if key not in subgroups:
        is_world = len(ranks) == dist.get_world_size()
        subgroup = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not is_world)
        assert isinstance(subgroup, dist.ProcessGroup)
        subgroups[key] = subgroup
        _kept.append(subgroup)
    return subgroups[key]


def _default_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return world


class Pending:
    """A collective under way.

    Args:
        tensor: where its result arrives.
        works: to wait for.
        finish: makes the result from what has arrived; None if it is the result.

    Attributes:
        is_followed: others of the same exchange are under way when this one has arrived.
    """

    def __init__(
        self, tensor: Tensor, works: Sequence[dist.Work | None], finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.is_followed = False
        self._tensor = tensor
        self._works = works
        self._finish = finish

    def wait(self) -> Tensor:
        """Returns the result.

        For CPU tensors it blocks until the collective is done. For CUDA tensors over NCCL it only makes the
        current stream wait.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        return self._tensor if self._finish is None else self._finish(self._tensor)


@dataclass
class _Traffic:
    """What was sent, in halves of an all-reduce's bytes."""

    half_bytes: int = 0


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
        self._traffic = _Traffic()
        self._scratch: dict[str, Tensor] = {}
        self._lanes: tuple[Channel, Channel] | None = None
        self._is_gloo = dist.get_backend(group) == "gloo"
        self._global_ranks = dist.get_process_group_ranks(group)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to collectives so far, in terms of an all-reduce.

        The two halves of an all-reduce (reduce-scatter or all-to-all, and all-gather) move half as much as it does:
        they count half. What stays within a node is not counted here, but in ``within``.
        """
        return self._traffic.half_bytes // 2 + (self.across.bytes_sent if self.across is not None else 0)

    def lanes(self) -> tuple[Channel, Channel]:
        """Returns two channels over this group, whose bytes count here, with scratch memory of their own.

        An exchange that has two collectives under way uses one for each.
        """
        if self._lanes is None:
            self._lanes = self._lane(), self._lane()
        return self._lanes

    def forget(self) -> None:
        """Sees to it that groups whose ranks may be out of step are not given out again."""
        for channel in (self, self.within, self.across):
            for subgroups in _subgroups.values():
                for key in [key for key, group in subgroups.items() if channel and group is channel._group]:
                    del subgroups[key]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for a message, with anything in it; the next exchange gets the same memory.

        On CPU fresh memory would cost as much as a message's arithmetic: the system clears it page by page.

        Args:
            name: what it is for; an exchange may have one of each.
            shape: of what is needed.
            dtype: of its elements.
            device: where.
        """
        if device.type != "cpu":  # torch keeps memory there by itself
            return torch.empty(shape, dtype=dtype, device=device)
        num_bytes = math.prod(shape) * dtype.itemsize
        if name not in self._scratch or self._scratch[name].numel() < num_bytes:
            self._scratch[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[name][:num_bytes].view(dtype).view(shape)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts to sum ``tensor`` over the ranks, in place.

        Args:
            tensor: any shape and dtype that the group's backend sums; dense, or sparse where the backend can.
        """
        values = tensor._values() if tensor.is_sparse else tensor
        self._traffic.half_bytes += 2 * values.nbytes
        return Pending(tensor, [dist.all_reduce(tensor, group=self._group, async_op=True)])

    def reduce_scatter(self, message: Tensor) -> Pending:
        """Starts to sum ``message`` over the ranks; the result ``(s,)`` is the row of this rank.

        Args:
            message: ``(W, s)`` of a dtype that the group's backend sums, contiguous.
        """
        if self._is_gloo:  # which has no such collective in all versions
            pending = self.all_to_all(message)
            return Pending(pending._tensor, pending._works, lambda received: received.sum(0))
        self._traffic.half_bytes += message.nbytes
        row = message.new_empty(message.shape[1])
        return Pending(row, [dist.reduce_scatter_tensor(row, message, group=self._group, async_op=True)])

    def all_to_all(self, message: Tensor) -> Pending:
        """Starts to send row ``i`` of ``message`` to rank ``i``; its row ``i`` becomes the result's row of this rank.

        Args:
            message: ``(W, s)`` of any dtype, contiguous.

        Returns:
            In scratch memory, good until the next exchange.
        """
        self._traffic.half_bytes += message.nbytes
        received = self.scratch("all_to_all", tuple(message.shape), message.dtype, message.device)
        if self._is_gloo and not message.is_cuda:
            return Pending(received, self._swap(list(message), list(received)))
        work = dist.all_to_all_single(_as_bytes(received), _as_bytes(message), group=self._group, async_op=True)
        return Pending(received, [work])

    def all_gather(self, part: Tensor) -> Pending:
        """Starts to send ``part`` to all ranks; the result ``(W, s)`` has one row of each.

        Args:
            part: ``(s,)`` of any dtype, contiguous.

        Returns:
            In scratch memory, good until the next exchange.
        """
        gathered = self.scratch("all_gather", (self.size, part.numel()), part.dtype, part.device)
        self._traffic.half_bytes += gathered.nbytes
        if self._is_gloo and not part.is_cuda:
            return Pending(gathered, self._swap([part] * self.size, list(gathered)))
        work = dist.all_gather_into_tensor(_as_bytes(gathered), _as_bytes(part), group=self._group, async_op=True)
        return Pending(gathered, [work])

    def _lane(self) -> Channel:
        lane = copy.copy(self)
        lane._scratch = {}
        return lane

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[dist.Work | None]:
        """Sends to and receives from every rank at once.

        gloo's own all-to-all and all-gather use a link in one direction at a time: a rank that sends before it has
        asked for its peer's message asks only behind its own. Here all ask first.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            works.append(dist.irecv(_as_bytes(incoming[source]), self._global_ranks[source], group=self._group))
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            works.append(dist.isend(_as_bytes(outgoing[target]), self._global_ranks[target], group=self._group))
        return works


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view that any backend can send; ``(n,)``."""
    return tensor.view(-1).view(torch.uint8)
