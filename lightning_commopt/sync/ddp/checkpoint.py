"""Checks whether the state in a checkpoint fits a model whose gradients travel in DDP's buckets."""

from __future__ import annotations

import torch
from torch.nn import Module

from lightning_commopt.compressors import Compressor, Layout, State
from lightning_commopt.compressors.base import as_real
from lightning_commopt.sync.state import AnyState, CheckpointError, CommState, agree_on_state


def usable_state(state: AnyState, compressor: Compressor | None, module: Module) -> CommState[Layout]:
    """Returns the state that this rank resumes from; see `agree_on_state`. All ranks must call it."""
    parameters = dict(module.named_parameters())

    def init(index: int, names: tuple[str, ...], layout: Layout) -> tuple[State, torch.device]:
        own = [parameters[name] for name in names if name in parameters and parameters[name].requires_grad]
        if tuple(as_real(parameter).shape for parameter in own) != layout.shapes:
            raise CheckpointError("it was saved with other parameters")
        assert compressor is not None
        return compressor.init(layout, own[0].device, state.num_syncs), own[0].device

    return agree_on_state(state, compressor, init, {name: as_real(x).shape for name, x in parameters.items()})
