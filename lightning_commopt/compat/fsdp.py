"""Private names of FSDP2, whose collectives `fsdp_calls` observes; see `lightning_commopt.compat`.

``_get_fsdp_state`` returns the state of a unit, which the modules of one call of ``fully_shard`` share, and
``_mp_policy`` is its policy. ``gradient_divide_factor``, ``force_sum_reduction_for_comms`` and ``_all_reduce_hook`` of
its parameter groups, and their comm objects ``_all_gather_comm`` and ``_reduce_scatter_comm`` (torch >= 2.9), have
public setters and no getters; the ``_module_info`` of their ``fsdp_params`` has the order of parameters. A group with
``_reduce_scatter_param_indices`` (torch >= 2.15) has the gradients of one ``grad_dtype`` side by side. A parameter's
``_post_accumulate_grad_hooks`` are called with a finished gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module


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
    dtypes = [getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")]
    parameters: Iterator[Tensor] = module.parameters()  # type: ignore[attr-defined]
    return {dtype for dtype in dtypes if dtype is not None} | {parameter.dtype for parameter in parameters}


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
    """Yields the objects that issue the "all_gather" and the "reduce_scatter" of each unit; none before torch 2.9."""
    for unit in units_of(model):
        yield from comm_objects_of(unit)


def comm_objects_of(unit: FSDPModule) -> Iterator[tuple[str, Any]]:
    """Yields the `comm_objects` of one unit."""
    for group in _groups_of(unit):
        for operation in ("all_gather", "reduce_scatter"):
            if (comm := getattr(group, f"_{operation}_comm", None)) is not None:
                yield operation, comm


def keeps_reduced(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a reduced gradient of ``dtype`` becomes the parameter's without a conversion or a hook."""
    grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype) or dtype
    return grad_dtype == dtype and not getattr(parameter, "_post_accumulate_grad_hooks", None)


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # newer versions have a group for each mesh
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]
