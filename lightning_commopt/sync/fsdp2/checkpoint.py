"""The state of FSDP2's units in checkpoints. In a directory each rank writes its own tensors; see `sync.checkpoint`.

These tensors are in a folder of their own, so that programs that load the model from the directory do not see them.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_commopt.compressors.base import State
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.checkpoint import KEY, open_checkpoint, read_state, to_plain
from lightning_commopt.sync.fsdp2.gradients import sharded_units
from lightning_commopt.sync.fsdp2.model_sync import ShardedModelSync
from lightning_commopt.sync.fsdp2.unit import layout_of
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.sync.state import CheckpointError, CommState, agree_on_state
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.sync.unit_layout import UnitLayout


def save_in_directory(state: CommState[UnitLayout], directory: Path, name: str = "") -> None:
    """Writes this rank's tensors into the directory of a checkpoint. All ranks must call it.

    ``name`` is the name of the module in a Fabric checkpoint, which may hold several.
    """
    rank, tensors = dist.get_rank(), dict[str, Tensor]()
    map_tensors(lambda x: tensors.update({f"{rank}/{len(tensors)}": x.cpu()}), to_plain(state))
    dcp.save(tensors or {f"{rank}/none": torch.zeros(1, device="cpu")}, checkpoint_id=directory / KEY / name)


def resume(sync: ShardedModelSync, saved: Any, strategy: RunningStrategy, path: Path, name: str = "") -> None:
    """Continues from the state in a checkpoint, between two backwards. All ranks must call it.

    Args:
        sync: the sync that continues; its model must be attached.
        saved: the state in the checkpoint; None if it has none.
        strategy: the strategy, which has the ranks.
        path: the checkpoint, a directory or a file.
        name: name of the module in a Fabric checkpoint.
    """
    gradients = sync.gradients
    if saved is None and gradients is None:
        return
    compressor = None if gradients is None else gradients.compressor

    def init(index: int, names: tuple[str, ...], layout: UnitLayout) -> tuple[State, torch.device]:
        assert gradients is not None
        assert compressor is not None
        unit = gradients.units[index] if index < len(gradients.units) else None
        own = {} if unit is None else {column.name: column for column in unit.columns}
        if unit is None or not own.keys() >= {*names} or layout != layout_of([own[x] for x in names], unit.num_shards):
            raise CheckpointError("it was saved with other units")
        return compressor.init(layout.numel, layout.num_shards, unit.device, unit.first_seed), unit.device

    load = partial(_load_part, path / KEY / name)
    open_saved = partial(open_checkpoint, load=load) if path.is_dir() else open_checkpoint
    state = read_state(saved, strategy, compressor, open_saved)
    sync.resume(agree_on_state(state, compressor, init, _shapes(sync)))


def _shapes(sync: ShardedModelSync) -> dict[str, torch.Size]:
    """Returns the shapes of the parameters whose gradients are reduce-scattered, by name."""
    assert sync.model is not None
    try:
        return {column.name: column.shape for _, columns in sharded_units(sync.model) for column in columns}
    except OptionError:  # without a comm_hook a model may be sharded in ways that comm_hook does not support
        return {}


def _load_part(directory: Path, rank: int, part: Any) -> Any:
    """Returns a rank's part of a checkpoint, with the tensors that it wrote into the directory."""
    tensors: dict[str, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        return tensors.setdefault(f"{rank}/{len(tensors)}", torch.empty_like(tensor, device="cpu"))

    part = map_tensors(allocate, part)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
            dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(f"its tensors cannot be read from {directory} ({error})") from error
    return part
