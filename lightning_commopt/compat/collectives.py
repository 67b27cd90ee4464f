"""Hooks of process groups, from torch 2.14 on; see `lightning_commopt.compat`.

Private are ``_world.pg_map``, the process groups that exist, and ``_c10d.HookOpName``; the hooks themselves are public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_HOOK_ID = 0x434F4D4D
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
_INPUTS_ARE_MORE = ("all_reduce", "broadcast", "reduce_scatter", "barrier")
_IGNORED = ("SPLIT", "NEW_WINDOW")  # they make groups and windows


class Issued(Protocol):
    """A collective that was issued."""

    def end(self) -> None:
        """It has completed; called on any thread, once at most."""


def has_collective_hooks() -> bool:
    """Returns whether this torch has hooks of process groups."""
    return dist.is_available() and hasattr(dist.ProcessGroup, "register_pre_hook")


class CollectiveHooks:
    """Observes every collective that this process issues, until `close`, whoever issues it.

    Args:
        issue: called on the issuing thread before each collective, with the name of the operation and its bytes: those
            of its inputs or of its outputs, whichever are more.
        sees_end: observe completion, of operations that have a future; for CPU tensors.
    """

    def __init__(self, issue: Callable[[str, int], Issued], *, sees_end: bool) -> None:
        self._issue, self._sees_end = issue, sees_end
        self._groups: list[dist.ProcessGroup] = []
        self._num_known = 0
        self._open: dict[tuple[int, int], Issued] = {}
        members: Mapping[str, Any] = torch._C._distributed_c10d.HookOpName.__members__
        self._names = {value: _name_of(name) for name, value in members.items() if name not in _IGNORED}
        self.update()

    def update(self) -> None:
        """Observes groups that were made since the last call."""
        groups = distributed_c10d._world.pg_map
        if len(groups) == self._num_known:
            return
        self._num_known = len(groups)
        for group in list(groups):
            if isinstance(group, dist.ProcessGroup) and not any(known is group for known in self._groups):
                self._groups.append(group)
                self._register(group, len(self._groups))

    def close(self) -> None:
        """Removes all hooks. A collective that is under way may still be observed to end."""
        while self._groups:
            group = self._groups.pop()
            group.unregister_pre_hook(_HOOK_ID)
            group.unregister_post_hook(_HOOK_ID)

    def _register(self, group: dist.ProcessGroup, number: int) -> None:
        names, issue, collectives = self._names, self._issue, self._open
        without_future: set[Any] = set()

        def before(args: Any) -> None:
            name = names.get(args.name)
            if name is not None:
                # Each access makes a list of tensors.
                sent = 0 if name == "all_gather" else sum([tensor.nbytes for tensor in args.input_tensors])
                received = 0 if name in _INPUTS_ARE_MORE else sum([tensor.nbytes for tensor in args.output_tensors])
                collectives[number, args.op_id] = issue(name, max(sent, received))

        def after(args: Any) -> None:
            issued = collectives.pop((number, args.op_id), None)
            if issued is None or not self._sees_end or (name := args.name) in without_future:
                return
            work = args.work
            if work is None:
                return
            try:
                future = work.get_future()
            except RuntimeError:  # as gloo's reduce_scatter; an exception each time would take 40 us
                without_future.add(name)
                return
            future.add_done_callback(lambda _: issued.end())

        group.register_pre_hook(_HOOK_ID, before)
        group.register_post_hook(_HOOK_ID, after)


def _name_of(member: str) -> str:
    """Returns the name of an operation in ``torch.distributed``.

    >>> [_name_of(member) for member in ("ALLGATHER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED", "BROADCAST")]
    ['all_gather', 'reduce_scatter', 'broadcast']
    """
    return next((name for prefix, name in _OPERATIONS.items() if member.startswith(prefix)), member.lower())
