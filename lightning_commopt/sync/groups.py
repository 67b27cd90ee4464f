"""Process groups for our own threads, which neither DDP nor the user uses.

If two threads issue collectives on one group, their order may differ between ranks: messages are then paired wrongly,
and ranks diverge or abort. So each of our threads borrows groups that nothing else uses, and returns them afterwards.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from weakref import WeakKeyDictionary

import torch.distributed as dist

_GLOO_EXIT_S = 0.05
"""Pause at the end of a process: ten times the 5 ms after which Python passes the GIL to a thread that requests it."""


@dataclass(eq=False)
class BorrowedGroups:
    """Groups that only their borrower uses, until it returns them."""

    all_ranks: dist.ProcessGroup  # has the ranks of the group ``beside`` of `borrow_groups`
    within: dist.ProcessGroup | None  # has the ranks of this node; None without ``ranks_per_node``
    across: dist.ProcessGroup | None  # has one rank of each node, those with this local rank; None without nodes
    is_free: bool = False

    def return_to_pool(self) -> None:
        """Frees the groups for the next borrower. All collectives on them must have succeeded on all ranks."""
        self.is_free = True


# For each default group, `_pools` and `_shared` have the groups of each kind in order of creation, which is the same on
# all their ranks. No group is ever freed: gloo's threads may hold tensors for a moment and need the GIL to release
# them, while the destructor of a group waits for its threads with the GIL held.
_pools: WeakKeyDictionary[dist.ProcessGroup, dict[object, list[BorrowedGroups]]] = WeakKeyDictionary()
_shared: WeakKeyDictionary[dist.ProcessGroup, dict[object, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = (
    WeakKeyDictionary()
)
_never_freed: list[object] = []


def borrow_groups(
    beside: dist.ProcessGroup,
    *,
    ranks_per_node: int | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    description: str | None = None,
) -> BorrowedGroups:
    """Returns groups of the ranks of ``beside`` for one thread or stream of messages. All its ranks must call this.

    Groups that are free on every rank are reused. Ranks may return groups at different times, since the garbage
    collector may be what returns them.

    Args:
        beside: the group whose ranks the new groups have.
        ranks_per_node: if set, there are also groups within and across nodes of this number of consecutive ranks.
        timeout: limit of collectives; None for the backend's default.
        backend: name of the backend; None for the default group's.
        description: what torch's Flight Recorder shows beside the name of the group of all ranks.
    """
    ranks = dist.get_process_group_ranks(beside)
    pool = _pools.setdefault(default_group(), {}).setdefault(
        (*ranks, ranks_per_node, timeout, backend, description), []
    )
    free_on_ranks: list[set[int]] = [set()] * len(ranks)
    dist.all_gather_object(free_on_ranks, {number for number, x in enumerate(pool) if x.is_free}, group=beside)
    free_everywhere = set.intersection(*free_on_ranks)
    if free_everywhere:
        groups = pool[min(free_everywhere)]
        groups.is_free = False
        return groups
    within, across = (None, None) if ranks_per_node is None else _node_groups(ranks, ranks_per_node, timeout, backend)
    all_ranks = _new_group([ranks], timeout, backend, description)
    groups = BorrowedGroups(all_ranks, within, across)
    pool.append(groups)
    _never_freed.append(groups)
    return groups


def borrow_host_group(description: str | None = None) -> BorrowedGroups:
    """Returns a gloo group of all ranks for small messages of the host; see `borrow_groups`. All ranks must call it.

    Raises:
        RuntimeError: the ranks cannot connect.
    """
    return borrow_groups(default_group(), backend="gloo", description=description)


def shared_node_groups(
    beside: dist.ProcessGroup, ranks_per_node: int, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns the groups within and across nodes that all hooks on CUDA share; see `borrow_groups`.

    On CUDA one thread enqueues all collectives on one stream, in one order, so that separate communicators for each
    hook would only cost memory.
    """
    ranks = dist.get_process_group_ranks(beside)
    key = (*ranks, ranks_per_node, timeout)
    shared = _shared.setdefault(default_group(), {})
    if key not in shared:
        shared[key] = _node_groups(ranks, ranks_per_node, timeout, None)
        _never_freed.append(shared[key])
    return shared[key]


def leave_process_group() -> None:
    """Destroys the default group, so that another one can be created."""
    if dist.is_initialized():
        _never_freed.append(default_group())
        dist.destroy_process_group()


@cache
def let_gloo_finish_at_exit() -> None:
    """Makes the process wait for `_GLOO_EXIT_S` at its end.

    gloo's threads release the tensors of the last collective a little after it is done, and need the GIL for that. If a
    thread requests the GIL while the interpreter shuts down, the process aborts or hangs.
    """
    atexit.register(time.sleep, _GLOO_EXIT_S)


def _node_groups(
    ranks: list[int], ranks_per_node: int, timeout: timedelta | None, backend: str | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    nodes = [ranks[first : first + ranks_per_node] for first in range(0, len(ranks), ranks_per_node)]
    across = [list(peers) for peers in zip(*nodes, strict=True)]
    return _new_group(nodes, timeout, backend), _new_group(across, timeout, backend)


def _new_group(
    parts: list[list[int]], timeout: timedelta | None, backend: str | None, description: str | None = None
) -> dist.ProcessGroup:
    """Creates a group for each of some disjoint sets of ranks, and returns the group that this rank belongs to."""
    # With local synchronization torch < 2.15 names a group by the number of groups that a rank is in, which user code
    # may have made unequal; without it, all ranks of the default group must make all groups.
    covers_all_ranks = sum(map(len, parts)) == dist.get_world_size()
    group = None
    for ranks in parts:
        if covers_all_ranks or dist.get_rank() in ranks:
            new = dist.new_group(
                ranks,
                timeout=timeout,
                backend=backend,
                use_local_synchronization=not covers_all_ranks,
                group_desc=description,
            )
            if dist.get_rank() in ranks:
                group = new
    assert isinstance(group, dist.ProcessGroup)
    return group


def default_group() -> dist.ProcessGroup:
    """Returns the default group, which must exist."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return world
