"""Private names of FSDP2, and observers of its collectives and waits; see `lightning_commopt.compat`.

``_get_fsdp_state`` returns the state of a unit, which the modules of one call of ``fully_shard`` share, and
``_mp_policy`` is its policy. ``gradient_divide_factor``, ``force_sum_reduction_for_comms`` and ``_all_reduce_hook`` of
its parameter groups, and their comm objects ``_all_gather_comm`` and ``_reduce_scatter_comm`` (torch >= 2.9), have
public setters and no getters; the ``_module_info`` of their ``fsdp_params`` has the order of parameters. A group with
``_reduce_scatter_param_indices`` (torch >= 2.15) has the gradients of one ``grad_dtype`` side by side. A parameter's
``_post_accumulate_grad_hooks`` are called with a finished gradient. Before torch 2.9 the module ``_fsdp_collectives``
calls collectives as functions of its global ``dist``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_commopt.compat.collectives import Issued, Listener


def units_of(model: Module) -> list[FSDPModule]:
    """Returns the units of a sharded model: the first module of each call of ``fully_shard``."""
    units: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), module)
    return list(units.values())


def parameters_of(module: FSDPModule) -> list[tuple[Module, str]]:
    """Returns the owner and the attribute of each parameter of a unit, in the order in which FSDP2 gathers them."""
    infos = [parameter._module_info for group in _groups_of(module) for parameter in group.fsdp_params]
    return [(info.module, info.param_name) for info in infos]


def order_of_gradients(unit: FSDPModule) -> list[int]:
    """Returns the places in `parameters_of` of a unit's parameters, in the order in which their gradients travel."""
    parameters = [getattr(owner, attribute) for owner, attribute in parameters_of(unit)]
    has_groups = any(hasattr(group, "_reduce_scatter_param_indices") for group in _groups_of(unit))
    dtypes = [parameter.grad_dtype if has_groups else None for parameter in parameters]
    return sorted(range(len(dtypes)), key=lambda place: dtypes.index(dtypes[place]))


def dtypes_of(module: FSDPModule) -> set[torch.dtype]:
    """Returns the dtypes in which parameters and gradients of a unit may travel."""
    policy: Any = getattr(module._get_fsdp_state(), "_mp_policy", None)
    given = [getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")]
    parameters: Iterator[Tensor] = module.parameters()  # type: ignore[attr-defined]
    return {dtype for dtype in given if dtype is not None} | {parameter.dtype for parameter in parameters}


def has_own_divide_factor(module: FSDPModule) -> bool:
    """Returns whether ``set_gradient_divide_factor`` was called."""
    return any(getattr(group, "gradient_divide_factor", None) is not None for group in _groups_of(module))


def forces_sum(module: FSDPModule) -> bool:
    """Returns whether ``set_force_sum_reduction_for_comms(True)`` was called."""
    return any(group.force_sum_reduction_for_comms for group in _groups_of(module))


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Returns whether ``set_all_reduce_hook`` was called."""
    return any(getattr(group, "_all_reduce_hook", None) is not None for group in _groups_of(module))


def comm_object(unit: FSDPModule, operation: str) -> Any:
    """Returns one of the `comm_objects` of a unit whose parameters have a single mesh."""
    return getattr(_groups_of(unit)[0], f"_{operation}_comm")


def comm_objects(model: Module) -> Iterator[tuple[str, Any]]:
    """Iterates over the objects that issue "all_gather" and "reduce_scatter" of each unit; none before torch 2.9."""
    return (pair for unit in units_of(model) for pair in _comm_objects_of(unit))


def _comm_objects_of(unit: FSDPModule) -> Iterator[tuple[str, Any]]:
    for group in _groups_of(unit):
        for operation in ("all_gather", "reduce_scatter"):
            if (comm := getattr(group, f"_{operation}_comm", None)) is not None:
                yield operation, comm


def keeps_reduced(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a reduced gradient of ``dtype`` becomes the parameter's without a conversion or a hook."""
    kept = getattr(parameter, "grad_dtype", parameter.dtype) or dtype
    return kept == dtype and not getattr(parameter, "_post_accumulate_grad_hooks", None)


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # newer versions have a group for each mesh
        return list(state._fsdp_param_groups)
    return [group for group in (state._fsdp_param_group,) if group is not None]


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
        found = (pair for unit in self._units for pair in _comm_objects_of(unit) if pair[0] in self._operations)
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
        for operation, comm in _comm_objects_of(unit):
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
