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

_Call = Callable[[], "dist.Work | None"]
_FUNCTIONS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}

Around = Callable[[], AbstractContextManager[None]]
"""Returns the context in which a collective is issued after its notification, or in which a thread waits for one."""


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
            self._undo[0] = self._observe_functions()
        self.update()

    def update(self) -> None:
        """Observes the comm objects that units have now, and no others; a change of plan replaces them."""
        if not _has_comm_objects():
            return
        pairs = (pair for unit in self._units for pair in comm_objects_of(unit) if pair[0] in self._operations)
        present = {id(comm): (operation, comm) for operation, comm in pairs}
        for lost in self._undo.keys() - present.keys():
            self._undo.pop(lost)()
        for new in present.keys() - self._undo.keys():
            self._undo[new] = self._observe(*present[new])

    def close(self) -> None:
        while self._undo:
            self._undo.popitem()[1]()

    def _observe(self, operation: str, comm: Any) -> Callable[[], object]:
        """Observes a comm object until the returned function is called."""
        if isinstance(comm, NotifyingComm):
            comm.listener, comm.around = self._listener, self._around

            def undo() -> None:
                del comm.listener, comm.around

            return undo
        own = type(comm)
        try:
            comm.__class__ = _with_calls(own, lambda _, num_bytes, call: self._issue(operation, num_bytes, call))
        except TypeError:  # the class of a user's object may be fixed
            return partial(id, comm)
        return partial(setattr, comm, "__class__", own)

    def _observe_functions(self) -> Callable[[], None]:
        """Observes the collectives of all sharded models in this process, until the returned function is called."""
        operations, issue = self._operations, self._issue

        class Observed:
            """Stands in for ``torch.distributed``, and notifies before two of its functions."""

            def __getattr__(self, name: str) -> Any:
                function, operation = getattr(dist, name), _FUNCTIONS.get(name)
                if operation is None or operation not in operations:
                    return function

                def call(*args: Any, **kwargs: Any) -> dist.Work | None:
                    num_bytes = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
                    return issue(operation, num_bytes, partial(function, *args, **kwargs))

                return call

        module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
        module.dist = Observed()
        return partial(setattr, module, "dist", dist)

    def _issue(self, operation: str, num_bytes: int, call: _Call) -> dist.Work | None:
        """Issues a collective, and notifies of it and of its end, which is now if there is no handle to wait for."""
        issued = self._listener(operation, num_bytes)
        with self._around():
            work = call()
        if issued is not None and self._sees_end:
            if work is None:
                issued.end()
            else:
                # On CUDA torch calls this in a stream that waits for the collective.
                work.get_future().add_done_callback(lambda _: issued.end())
        return work


AroundCall = Callable[[str, FSDPModule, int, bool], AbstractContextManager[None]]
"""Makes the context of a call of a comm object: its operation, its unit, the bytes of its inputs or its outputs, and
whether it is FSDP2's own, which blocks a thread on CPU until it has ended."""


def around_calls(model: Module, around: AroundCall) -> Callable[[], None]:
    """Makes calls of the comm objects of a model's units run within a context, in the thread of their caller.

    The returned function undoes that. Until it is called nothing else may replace the class of these objects, except of
    those that no longer belong to a unit.
    """
    replaced: list[tuple[Any, type, type]] = []
    for unit in units_of(model):
        for operation, comm in comm_objects_of(unit):
            own, within = type(comm), _with_calls(type(comm), partial(_call_within, partial(around, operation, unit)))
            with suppress(TypeError):  # the class of a user's object may be fixed
                comm.__class__ = within
                replaced.append((comm, own, within))

    def close() -> None:
        while replaced:
            comm, own, within = replaced.pop()
            if type(comm) is within:
                comm.__class__ = own

    return close


def _call_within(
    around: Callable[[int, bool], AbstractContextManager[None]], comm: object, num_bytes: int, call: _Call
) -> dist.Work | None:
    with around(num_bytes, not isinstance(comm, NotifyingComm)):
        return call()


def _with_calls(base: type, around: Callable[[Any, int, _Call], dist.Work | None]) -> type:
    """Returns a class for comm objects of a class: calls become ``around(comm object, bytes, call)``."""

    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        num_bytes = max(output_tensor.nbytes, input_tensor.nbytes)
        return around(self, num_bytes, partial(base.__call__, self, output_tensor, input_tensor, *args, **kwargs))

    return type(base.__name__, (base,), {"__slots__": (), "__call__": call})


def _has_comm_objects() -> bool:
    return hasattr(FSDPModule, "set_custom_all_gather")


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
