"""Observes FSDP2's all-gathers and reduce-scatters through the objects that issue them (torch >= 2.9)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compat.collectives import Listener
from lightning_commopt.compat.fsdp import comm_objects
from lightning_commopt.sync.sharded_unit import CompressedUnit


class ObservedUnits:
    """Notifies a listener of the collectives of a model that FSDP2 has sharded, until `close`.

    Our comm objects that compress notify by themselves. Others keep their state and get a class derived from their own,
    which notifies around the call. ``sees_end`` observes completion too, for CPU tensors.
    """

    def __init__(
        self,
        model: Module,
        listener: Listener,
        operations: Collection[str] = ("all_gather", "reduce_scatter"),
        *,
        sees_end: bool,
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        for operation, comm in {id(comm): (operation, comm) for operation, comm in comm_objects(model)}.values():
            if operation not in operations:
                continue
            if isinstance(comm, CompressedUnit):
                comm.listener = listener
                self._undo.append(partial(setattr, comm, "listener", None))
            else:
                undo = partial(setattr, comm, "__class__", type(comm))
                with suppress(TypeError):  # of somebody's object whose class is fixed
                    comm.__class__ = _observed(type(comm), operation, listener, sees_end=sees_end)
                    self._undo.append(undo)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


def _observed(base: type, operation: str, listener: Listener, *, sees_end: bool) -> type:
    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        issued = listener(operation, max(output_tensor.nbytes, input_tensor.nbytes))
        work = base.__call__(self, output_tensor, input_tensor, *args, **kwargs)
        if issued is not None and sees_end:
            if work is None:
                issued.end()
            else:
                work.get_future().add_done_callback(lambda _: issued.end())
        return work

    return type(base.__name__, (base,), {"__slots__": (), "__call__": call})
