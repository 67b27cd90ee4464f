"""Hooks of process groups, from torch 2.14 on; see `lightning_commopt.compat`.

The private names are ``_world.pg_map``, the process groups that exist, and ``_c10d.HookOpName``; the hooks are public.

torch keeps the hooks of a group in a C++ map without a lock. This has two consequences:

1. Removing a hook frees it, and another thread that is about to call it then crashes. So a group keeps its two hooks,
   and only the Python list of their listeners changes.
2. torch destroys groups that are still registered after Python has ended. Destroying a hook then takes the GIL, which
   is a segmentation fault. So all hooks are removed when Python begins to end.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_commopt.compat.torch import sparse_values
from lightning_commopt.text.validation import warn_once

_HOOK_ID = 0x434F4D4D  # "COMM" in ASCII, which other users of these hooks are unlikely to choose
_EXIT_S = 0.05
"""Pause for threads that wait for the GIL in a hook, ten times the 5 ms after which Python hands it to them."""
_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
_NO_LARGER_OUTPUTS = ("all_reduce", "broadcast", "reduce_scatter", "barrier")  # their inputs tell the bytes
_IGNORED = ("SPLIT", "NEW_WINDOW")  # these make groups and windows, and transfer no tensors


class Issued(Protocol):
    """A collective that was issued."""

    def end(self) -> None:
        """Called when it has completed, from any thread and at most once."""


Listener = Callable[[str, int], "Issued | None"]
"""Called on the issuing thread before each collective, with the name of the operation and the bytes of its inputs or
its outputs, whichever is larger. Returns an object that observes its completion, or None."""


def has_collective_hooks() -> bool:
    """Returns whether this torch has hooks of process groups."""
    return dist.is_available() and hasattr(dist.ProcessGroup, "register_pre_hook")


def listen(group: dist.ProcessGroup, listener: Listener, *, sees_end: bool) -> Callable[[], None]:
    """Notifies ``listener`` of every collective on a group of this process; returns a function that ends that.

    The group is not kept alive.

    Args:
        group: the group.
        listener: see `Listener`.
        sees_end: whether to observe completion too, for CPU tensors and operations with a future. If one listener of
            a group wants this, all of them see it.
    """
    hooks = _HOOKS.get(group)
    if hooks is None:
        hooks = _HOOKS[group] = _GroupHooks(group)
        _remove_hooks_at_exit()
    hooks.add(listener, sees_end=sees_end)
    return lambda: hooks.remove(listener)


class CollectiveHooks:
    """Observes every collective that this process issues on any group, until `close`; see `listen`."""

    def __init__(self, listener: Listener, *, sees_end: bool) -> None:
        self._listener, self._sees_end = listener, sees_end
        self._removers: WeakKeyDictionary[dist.ProcessGroup, Callable[[], None]] = WeakKeyDictionary()
        self._num_known = 0
        self.update()

    def update(self) -> None:
        """Observes groups that were made since the last call."""
        groups = distributed_c10d._world.pg_map
        if len(groups) == self._num_known:
            return
        self._num_known = len(groups)
        for group in list(groups):
            if isinstance(group, dist.ProcessGroup) and group not in self._removers:
                self._removers[group] = listen(group, self._listener, sees_end=self._sees_end)

    def close(self) -> None:
        """Stops observing. The end of a collective that is under way may still be observed."""
        removers, self._removers = self._removers, WeakKeyDictionary()
        for remove in removers.values():
            remove()


class _GroupHooks:
    """The two hooks of one process group, which all listeners share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._listeners: tuple[Listener, ...] = ()  # replaced as a whole, since other threads iterate over it
        self._sees_end = False
        self._open: dict[int, list[Issued]] = {}
        self._without_future: set[object] = set()
        members: Mapping[str, Any] = torch._C._distributed_c10d.HookOpName.__members__
        self._names = {value: _name_of(name) for name, value in members.items() if name not in _IGNORED}
        group.register_pre_hook(_HOOK_ID, self._before)
        group.register_post_hook(_HOOK_ID, self._after)

    def add(self, listener: Listener, *, sees_end: bool) -> None:
        self._listeners = (*self._listeners, listener)
        self._sees_end |= sees_end

    def remove(self, listener: Listener) -> None:
        self._listeners = tuple(other for other in self._listeners if other != listener)
        self._sees_end = self._sees_end and bool(self._listeners)

    def remove_all(self) -> None:
        self._listeners, self._sees_end = (), False

    def _before(self, args: Any) -> None:
        listeners = self._listeners
        if not listeners or (name := self._names.get(args.name)) is None:
            return
        try:
            # torch makes a new list of tensors at each access, so this reads only the larger of the two lists.
            sent = 0 if name == "all_gather" else _nbytes(args.input_tensors)
            received = 0 if name in _NO_LARGER_OUTPUTS else _nbytes(args.output_tensors)
            num_bytes = sent if sent > received else received
            issued = [watched for listener in listeners if (watched := listener(name, num_bytes)) is not None]
        except Exception as error:
            # An exception that leaves a hook would make the user's collective fail.
            self.remove_all()
            warn_once(f"collectives can no longer be observed: {type(error).__name__}: {error}")
            return
        if issued and self._sees_end:
            self._open[args.op_id] = issued

    def _after(self, args: Any) -> None:
        if not self._open:
            return
        issued = self._open.pop(args.op_id, None)
        if issued is None or args.name in self._without_future or (work := args.work) is None:
            return

        def end(_: object) -> None:
            for watched in issued:
                watched.end()

        try:
            work.get_future().add_done_callback(end)
        except Exception:
            # gloo's reduce_scatter, for example, has no future, and asking for one costs an exception, 40 us.
            self._without_future.add(args.name)


_HOOKS: WeakKeyDictionary[dist.ProcessGroup, _GroupHooks] = WeakKeyDictionary()


@cache
def _remove_hooks_at_exit() -> None:
    atexit.register(_remove_hooks)


def _remove_hooks() -> None:
    """Removes our hooks from all groups, after a pause in which threads that are in a hook leave it."""
    for hooks in _HOOKS.values():
        hooks.remove_all()
    time.sleep(_EXIT_S)
    for group in _HOOKS:
        group.unregister_pre_hook(_HOOK_ID)
        group.unregister_post_hook(_HOOK_ID)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum([sparse_values(tensor).nbytes for tensor in tensors])


def _name_of(member: str) -> str:
    """Returns the name of an operation in ``torch.distributed``.

    >>> [_name_of(member) for member in ("ALLGATHER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED", "BROADCAST")]
    ['all_gather', 'reduce_scatter', 'broadcast']
    """
    return next((name for prefix, name in _OPERATIONS.items() if member.startswith(prefix)), member.lower())
