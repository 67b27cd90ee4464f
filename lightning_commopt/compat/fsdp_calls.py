"""Observers of FSDP2's collectives, and of the waits for them; see `lightning_commopt.compat`.

Before torch 2.9, which has comm objects, the module ``_fsdp_collectives`` calls collectives as functions of its global
``dist``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_commopt.compat.collectives import Issued, Listener
from lightning_commopt.compat.fsdp import comm_objects_of, units_of

Around = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a collective that was notified of is issued, and in which a thread waits for one."""


class NotifyingComm:
    """Base of our comm objects, which notify the ``listener`` themselves and issue collectives within ``around()``."""

    listener: Listener | None = None
    around: Around = nullcontext

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ObservedUnits:
    """Notifies a listener of the collectives of a model that FSDP2 has sharded, until `close`.

    Our comm objects notify it themselves. Others keep their state, and get a class derived from their own that notifies
    before each call.

    Args:
        model: the model.
        listener: see `Listener`.
        operations: the operations to observe.
        sees_end: whether to observe completion too. On CUDA a collective counts as completed when the stream that
            issued it has waited for it.
        around: see `Around`.
    """

    def __init__(
        self,
        model: Module,
        listener: Listener,
        operations: Collection[str] = ("all_gather", "reduce_scatter"),
        *,
        sees_end: bool,
        around: Around = nullcontext,
    ) -> None:
        self._listener, self._operations, self._sees_end, self._around = listener, operations, sees_end, around
        self._units = units_of(model)
        # The keys are ids of comm objects. Each function keeps its object alive, so that no other one gets its id.
        self._undo: dict[int, Callable[[], object]] = {}
        if not _has_comm_objects() and self._units:
            self._undo[0] = _observe_functions(listener, operations, sees_end=sees_end, around=around)
        self.update()

    def update(self) -> None:
        """Observes the comm objects that units have now, and no others; a change of plan replaces them."""
        if not _has_comm_objects():
            return
        found = (pair for unit in self._units for pair in comm_objects_of(unit) if pair[0] in self._operations)
        present = {id(comm): (operation, comm) for operation, comm in found}
        for gone in self._undo.keys() - present.keys():
            self._undo.pop(gone)()
        for new in present.keys() - self._undo.keys():
            self._undo[new] = self._observe(*present[new])

    def close(self) -> None:
        while self._undo:
            self._undo.popitem()[1]()

    def _observe(self, operation: str, comm: Any) -> Callable[[], object]:
        """Observes a comm object until the result is called."""
        if isinstance(comm, NotifyingComm):
            comm.listener, comm.around = self._listener, self._around

            def undo() -> None:
                del comm.listener, comm.around

            return undo
        own = type(comm)
        try:
            comm.__class__ = _observed(own, operation, self._listener, sees_end=self._sees_end, around=self._around)
        except TypeError:  # the class of a user's object may be fixed
            return partial(id, comm)
        return partial(setattr, comm, "__class__", own)


AroundCall = Callable[[str, FSDPModule, int, bool], AbstractContextManager[None]]
"""Makes the context of a call of a comm object: its operation, its unit, the bytes of its inputs or its outputs, and
whether it is FSDP2's own, which blocks a thread on CPU until it has ended."""


def around_calls(model: Module, around: AroundCall) -> Callable[[], None]:
    """Calls the comm objects of a model's units within a context, in the caller's thread, until the result is called.

    Until then nothing else may replace the class of these objects, but for those that their units have lost.
    """
    replaced: list[tuple[Any, type, type]] = []
    for unit in units_of(model):
        for operation, comm in comm_objects_of(unit):
            own, within = type(comm), _within(type(comm), partial(around, operation, unit))
            with suppress(TypeError):  # the class of a user's object may be fixed
                comm.__class__ = within
                replaced.append((comm, own, within))

    def close() -> None:
        while replaced:
            comm, own, within = replaced.pop()
            if type(comm) is within:
                comm.__class__ = own

    return close


def _within(base: type, around: Callable[[int, bool], AbstractContextManager[None]]) -> type:
    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        num_bytes = max(output_tensor.nbytes, input_tensor.nbytes)
        with around(num_bytes, not isinstance(self, NotifyingComm)):
            work: dist.Work | None = base.__call__(self, output_tensor, input_tensor, *args, **kwargs)
        return work

    return type(base.__name__, (base,), {"__call__": call})


def _has_comm_objects() -> bool:
    return hasattr(FSDPModule, "set_custom_all_gather")


def _observed(base: type, operation: str, listener: Listener, *, sees_end: bool, around: Around) -> type:
    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        issued = listener(operation, max(output_tensor.nbytes, input_tensor.nbytes))
        with around():
            work: dist.Work | None = base.__call__(self, output_tensor, input_tensor, *args, **kwargs)
        _observe_end(issued if sees_end else None, work)
        return work

    return type(base.__name__, (base,), {"__slots__": (), "__call__": call})


def _observe_functions(
    listener: Listener, operations: Collection[str], *, sees_end: bool, around: Around
) -> Callable[[], None]:
    """Notifies of the collectives of all sharded models in this process, until the result is called."""

    class Observed:
        """Stands in for ``torch.distributed``, and notifies before two of its functions."""

        def __getattr__(self, name: str) -> Any:
            function = getattr(dist, name)
            if (operation := _FUNCTIONS.get(name)) not in operations:
                return function

            def call(*args: Any, **kwargs: Any) -> dist.Work | None:
                tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
                issued = listener(str(operation), max(tensor.nbytes for tensor in tensors))
                with around():
                    work: dist.Work | None = function(*args, **kwargs)
                _observe_end(issued if sees_end else None, work)
                return work

            return call

    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    module.dist = Observed()
    return partial(setattr, module, "dist", dist)


_FUNCTIONS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def _observe_end(issued: Issued | None, work: dist.Work | None) -> None:
    """Notifies of the end of a collective, at once if it has no handle to wait for."""
    if issued is None:
        return
    if work is None:
        issued.end()
    else:
        # On CUDA torch calls this in a stream that waits for the collective.
        work.get_future().add_done_callback(lambda _: issued.end())


class ComputationWaits:
    """Observes, until `close`, every wait of the stream of a model's computation for an event of another stream.

    It replaces the public ``torch.cuda.Stream.wait_event``, which FSDP2 calls before it uses gathered parameters or
    reduced gradients.
    """

    def __init__(self, device: torch.device, on_wait: Callable[[], Issued | None]) -> None:
        stream = torch.cuda.current_stream(device)
        inner = torch.cuda.Stream.wait_event

        def wait_event(self: torch.cuda.Stream, event: torch.Event) -> None:
            if self != stream:
                inner(self, event)
                return
            wait = on_wait()
            inner(self, event)
            if wait is not None:
                wait.end()

        torch.cuda.Stream.wait_event = wait_event  # type: ignore[method-assign]
        self._inner = inner

    def close(self) -> None:
        torch.cuda.Stream.wait_event = self._inner  # type: ignore[method-assign]
