"""The state of gradient sync in Lightning's checkpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compressors import Compressor
from lightning_commopt.compressors.base import as_real
from lightning_commopt.sync.gather import all_ranks_ready, gather_on_rank_0
from lightning_commopt.sync.state import (
    CheckpointError,
    CommState,
    adopt_states,
    from_checkpoint,
    to_checkpoint,
    to_plain,
)
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import info, warn

_PATIENCE = timedelta(seconds=60)


def gather_state(
    state: CommState | None, *, is_in_batch: bool, world_size: int, timeout: timedelta, device: torch.device
) -> dict[str, Any] | None:
    """Gathers all ranks' states for a checkpoint, on rank 0, which writes it. All ranks should call it.

    If an exception or a signal keeps some ranks from calling it between two batches, it warns and returns None.
    """
    if state is None or state.is_common or world_size == 1:
        parts = [] if state is None or state.is_common else [to_plain(state.on_cpu())]
        return None if state is None else to_checkpoint(state.compressor, state.num_syncs, parts)
    position = None if is_in_batch else str(state.num_syncs)
    patience_s, timeout_s = min(_PATIENCE, timeout).total_seconds(), timeout.total_seconds()
    if not dist.is_initialized() or not all_ranks_ready(position, patience_s, timeout_s):
        warn(
            "A checkpoint is saved without the state of comm_hook: not all ranks saved it between the same two batches."
        )
        return None
    ranks = gather_on_rank_0(to_plain(state), device)
    return None if ranks is None else to_checkpoint(state.compressor, state.num_syncs, ranks)


def read_state(saved: Any, rank: int, world_size: int, compressor: Compressor | None) -> CommState:
    """Returns one rank's state from `gather_state`; an empty one, with a warning, if it cannot be used."""
    if saved is None:
        return CommState(is_common=True)
    try:
        return from_checkpoint(saved, rank, world_size, compressor)
    except CheckpointError as error:
        _warn_of_unusable(error)
        return CommState()


def usable_state(state: CommState, compressor: Compressor | None, module: Module) -> CommState:
    """Returns the state that all ranks can resume from: of states that do not fit everywhere, the residuals only."""
    buckets, obstacle = {}, None
    try:
        if compressor is not None:
            buckets = adopt_states(state, compressor, module)
    except CheckpointError as error:
        obstacle = str(error)
    is_exact, num_syncs = _agree(state.num_syncs, obstacle, sorted(buckets))
    if obstacle is not None:
        info(f"Only the residuals of the checkpoint's state of comm_hook are used, as {obstacle}.")
    residuals = state.residuals if is_exact and compressor is not None else _readable_residuals(state)
    return CommState(compressor, num_syncs, buckets if is_exact else {}, _select_known(residuals, module))


def _agree(num_syncs: int, obstacle: str | None, buckets: list[int]) -> tuple[bool, int]:
    """Returns whether all ranks can use their states, which must fit together, and the number of gradient syncs."""
    mine = (num_syncs, obstacle is None, buckets)
    everyone = [mine]
    if dist.is_initialized():
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    is_exact = obstacle is None and all(other == mine for other in everyone)
    return is_exact, max(number for number, _, _ in everyone)


def _readable_residuals(state: CommState) -> dict[str, Tensor]:
    try:
        return state.all_residuals()
    except CheckpointError as error:
        _warn_of_unusable(error)
        return {}


def _warn_of_unusable(error: CheckpointError) -> None:
    warn(f"The checkpoint's state of comm_hook cannot be used, as {error}; it starts from zero.")


def _select_known(residuals: dict[str, Tensor], module: Module) -> dict[str, Tensor]:
    shapes = {name: as_real(parameter).shape for name, parameter in module.named_parameters()}
    lost = [name for name, value in residuals.items() if shapes.get(name) != value.shape]
    if lost:
        shown = list_some(lost, 8)
        warn(
            f"comm_hook: residuals of {len(lost)} parameters in the checkpoint are dropped, as the model has none of"
            f" that name and shape: {shown}."
        )
    return {name: value for name, value in residuals.items() if name not in lost}
