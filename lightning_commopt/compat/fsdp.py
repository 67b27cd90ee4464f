"""Private names of FSDP2; see `lightning_commopt.compat`.

``_get_fsdp_state`` is the state that modules share which one call of ``fully_shard`` has made a unit, ``_mp_policy`` is
its policy. ``gradient_divide_factor`` and ``_all_reduce_hook`` of its parameter groups, and their comm objects
``_all_gather_comm`` and ``_reduce_scatter_comm`` (torch >= 2.9), are what setters set and nothing returns; the
``_module_info`` of their ``fsdp_params`` has the order of parameters. Hooks that are called with a finished gradient
are ``_post_accumulate_grad_hooks`` of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module


def units_of(model: Module) -> list[tuple[FSDPModule, ...]]:
    """Returns the units of a sharded model: the modules of each call of ``fully_shard``."""
    units: dict[int, list[FSDPModule]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(module._get_fsdp_state()), []).append(module)
    return [tuple(modules) for modules in units.values()]


def parameters_of(module: FSDPModule) -> list[tuple[Module, str]]:
    """Returns owner and attribute of each parameter of a unit, in the order in which FSDP2 lays them out."""
    infos = [parameter._module_info for group in _groups_of(module) for parameter in group.fsdp_params]
    return [(info.module, info.param_name) for info in infos]


def dtypes_of(module: FSDPModule) -> set[torch.dtype]:
    """Returns the dtypes in which parameters and gradients of a unit may travel."""
    policy: Any = getattr(module._get_fsdp_state(), "_mp_policy", None)
    given = [getattr(policy, name, None) for name in ("param_dtype", "reduce_dtype")]
    return {dtype for dtype in given if dtype is not None} | {each.dtype for each in module.parameters()}  # type: ignore[attr-defined]


def has_own_divide_factor(module: FSDPModule) -> bool:
    """Returns whether somebody has called ``set_gradient_divide_factor``."""
    return any(getattr(group, "gradient_divide_factor", None) is not None for group in _groups_of(module))


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Returns whether somebody has called ``set_all_reduce_hook``."""
    return any(getattr(group, "_all_reduce_hook", None) is not None for group in _groups_of(module))


def comm_objects(model: Module) -> Iterator[tuple[str, Any]]:
    """Yields what issues the "all_gather" and the "reduce_scatter" of each unit; nothing before torch 2.9.

    A unit comes before those within it.
    """
    for modules in units_of(model):
        for group in _groups_of(modules[0]):
            for operation in ("all_gather", "reduce_scatter"):
                if (comm := getattr(group, f"_{operation}_comm", None)) is not None:
                    yield operation, comm


def keeps_reduced(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a reduced gradient of ``dtype`` becomes that of a parameter as it is, and no hook sees it."""
    kept = getattr(parameter, "grad_dtype", parameter.dtype) or dtype
    return kept == dtype and not getattr(parameter, "_post_accumulate_grad_hooks", None)


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # one for each mesh, in newer versions
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]
