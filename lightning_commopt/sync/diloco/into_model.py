"""Changes to a model and its fragments: mixing in the result of an exchange, and dividing the model again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_commopt.sync.diloco.exchange import Exchange, GlobalWeights


@torch.no_grad()
def mix(global_state: GlobalWeights, own_share: float) -> None:
    """Replaces a worker's buffers by the global ones, and interpolates its parameters with the global ones.

    ``own_share`` is the share of the worker's own parameters in the result; 0 replaces them.
    """
    fragment = global_state.fragment
    for own, value in zip(fragment.real_parameters(), fragment.views(global_state.weights), strict=True):
        if own_share:
            _mix_parameter(own, value, own_share)
        else:
            own.copy_(value, non_blocking=True)
    buffers = [*fragment.floats.values(), *fragment.integers.values()]
    for tensor, value in zip(buffers, [*global_state.floats, *global_state.integers], strict=True):
        tensor.copy_(value, non_blocking=True)


def _mix_parameter(own: Tensor, value: Tensor, own_share: float) -> None:
    new, mixed = value.to(own.device, non_blocking=True), own.to(value.dtype)  # `own` itself if it has this dtype
    torch.lerp(new, mixed, own_share, out=mixed)
    if mixed is not own:
        own.copy_(mixed)


def carry_over(old: Sequence[GlobalWeights], new: Sequence[GlobalWeights], exchange: Exchange) -> None:
    """Gives the fragments of a model that was divided again the state of the old fragments, parameter by parameter.

    Parameters and buffers that have replaced others of the same name start without the old state.
    """
    current = {
        name: x
        for global_state in new
        for name, x in {**global_state.fragment.parameters, **global_state.fragment.buffers}.items()
    }
    carried: list[dict[str, Tensor]] = [{}, {}, {}]
    for global_state in old:
        flats = global_state.weights, global_state.momentum, exchange.unsent(global_state)
        for by_name, flat in zip(carried, flats, strict=True):
            parts = {} if flat is None else global_state.fragment.by_name(flat)
            by_name.update(
                {name: x for name, x in parts.items() if global_state.fragment.parameters[name] is current.get(name)}
            )
    buffers = {
        name: x
        for global_state in old
        for (name, buffer), x in zip(
            global_state.fragment.buffers.items(), [*global_state.floats, *global_state.integers], strict=True
        )
        if buffer is current.get(name)
    }
    for global_state in new:
        global_state.carried = torch.zeros_like(global_state.weights) if carried[2] else None
        for by_name, flat in zip(
            carried, (global_state.weights, global_state.momentum, global_state.carried), strict=True
        ):
            for name, x in global_state.fragment.by_name(flat).items() if flat is not None else ():
                x.copy_(by_name.get(name, x))
        global_state.floats = [
            buffers.get(name, x) for name, x in zip(global_state.fragment.floats, global_state.floats, strict=True)
        ]
        global_state.integers = [
            buffers.get(name, x) for name, x in zip(global_state.fragment.integers, global_state.integers, strict=True)
        ]
