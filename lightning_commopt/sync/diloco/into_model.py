"""What exchanges do to a model and to its fragments: mixing new weights in, and dividing the model anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_commopt.sync.diloco.exchange import Exchange, GlobalWeights


@torch.no_grad()
def mix(of: GlobalWeights, own_share: float) -> None:
    """Replaces a worker's buffers, and all but a share of its parameters, by global values."""
    fragment = of.fragment
    for own, value in zip(fragment.real_parameters(), fragment.views(of.weights), strict=True):
        if own_share:
            _mix_parameter(own, value, own_share)
        else:
            own.copy_(value, non_blocking=True)
    buffers = [*fragment.floats.values(), *fragment.integers.values()]
    for tensor, value in zip(buffers, [*of.floats, *of.integers], strict=True):
        tensor.copy_(value, non_blocking=True)


def _mix_parameter(own: Tensor, value: Tensor, own_share: float) -> None:
    new, wide = value.to(own.device, non_blocking=True), own.to(value.dtype)  # `own` itself if it has this dtype
    torch.lerp(new, wide, own_share, out=wide)
    if wide is not own:
        own.copy_(wide)


def carry_over(old: Sequence[GlobalWeights], new: Sequence[GlobalWeights], exchange: Exchange) -> None:
    """Gives the fragments of a model that was divided anew what the old ones have, parameter by parameter.

    Parameters and buffers that have taken the place of others of the same name begin anew.
    """
    now = {name: x for of in new for name, x in {**of.fragment.parameters, **of.fragment.buffers}.items()}
    kept: list[dict[str, Tensor]] = [{}, {}, {}]
    for of in old:
        flats = of.weights, of.momentum, exchange.unsent(of)
        for by_name, flat in zip(kept, flats, strict=True):
            parts = {} if flat is None else of.fragment.by_name(flat)
            by_name.update({name: x for name, x in parts.items() if of.fragment.parameters[name] is now.get(name)})
    buffers = {
        name: x
        for of in old
        for (name, buffer), x in zip(of.fragment.buffers.items(), [*of.floats, *of.integers], strict=True)
        if buffer is now.get(name)
    }
    for of in new:
        of.carried = torch.zeros_like(of.weights) if kept[2] else None
        for by_name, flat in zip(kept, (of.weights, of.momentum, of.carried), strict=True):
            for name, x in of.fragment.by_name(flat).items() if flat is not None else ():
                x.copy_(by_name.get(name, x))
        of.floats = [buffers.get(name, x) for name, x in zip(of.fragment.floats, of.floats, strict=True)]
        of.integers = [buffers.get(name, x) for name, x in zip(of.fragment.integers, of.integers, strict=True)]
