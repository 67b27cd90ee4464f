"""The ``state_dict`` of a module with the global weights in place of a worker's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_commopt.sync.diloco.exchange import GlobalWeights
from lightning_commopt.sync.diloco.rounds import Rounds


def global_state_dict(module: Module, rounds: Rounds) -> dict[str, Any]:
    """Returns a module's ``state_dict`` with global weights and buffers in place of a worker's own.

    Real tensors in float32 and float64 share the memory of the global weights. They do not if the module computes its
    state, for instance by merging adapters into the weights.
    """
    state = module.state_dict()
    if not rounds.shows_own:
        return state
    values = {_place(x): value for global_state in rounds.fragments for x, value in _pairs(global_state)}
    places = {*values, *map(_place, (*module.parameters(), *module.buffers()))}
    if any(isinstance(x, Tensor) and x.numel() and _place(x) not in places for x in state.values()):
        return _computed_state(module, rounds)
    for name, x in state.items():
        if isinstance(x, Tensor) and _place(x) in values:
            state[name] = values[_place(x)].to(x.dtype)
    return state


def _computed_state(module: Module, rounds: Rounds) -> dict[str, Any]:
    rounds.show_global()
    try:
        state = module.state_dict()
        for name, x in state.items():
            if isinstance(x, Tensor):
                state[name] = x.clone()
    finally:
        rounds.show_own()
    return state


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _pairs(global_state: GlobalWeights) -> list[tuple[Tensor, Tensor]]:
    """Returns all tensors of a fragment that have elements, each with its global value."""
    parameters = [*global_state.fragment.parameters.values()]
    values = [
        # It must be a copy: ``torch.save`` refuses memory that is used for both real and complex numbers, and a view as
        # complex numbers must start at an even offset in the flat tensor.
        torch.view_as_complex(value.clone()) if x.is_complex() else value
        for x, value in zip(parameters, global_state.fragment.views(global_state.weights), strict=True)
    ]
    tensors = [*parameters, *global_state.fragment.floats.values(), *global_state.fragment.integers.values()]
    pairs = zip(tensors, [*values, *global_state.floats, *global_state.integers], strict=True)
    return [(x, value) for x, value in pairs if x.numel()]
