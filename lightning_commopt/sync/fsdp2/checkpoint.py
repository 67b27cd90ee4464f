"""The state of FSDP2's units in checkpoints: of a directory in a folder beside the model's, or in the one file.

In a directory each rank writes its own tensors, with torch's distributed checkpoints (DCP), under the keys
``<rank>/<number>``. The folder of its own keeps them out of sight of whoever reads the model. The rest of the state has
tensors without data in their place, in the same order.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_commopt.compressors.base import State
from lightning_commopt.compressors.shards import first_seed
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.checkpoint import KEY, SavedState, open_checkpoint, read_state, to_plain
from lightning_commopt.sync.fsdp2.gradients import sharded_units
from lightning_commopt.sync.fsdp2.model_sync import ShardedModelSync
from lightning_commopt.sync.fsdp2.unit import Column, layout_of
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.sync.state import CheckpointError, CommState, agree_on_state, as_checkpoint_error
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.sync.unit_layout import UnitLayout


def save_in_directory(state: CommState[UnitLayout], directory: Path, name: str = "") -> None:
    """Writes this rank's tensors into the directory of a checkpoint. All ranks must call it.

    ``name`` is that of the module, where a checkpoint may hold several.
    """
    rank, tensors = dist.get_rank(), dict[str, Tensor]()
    map_tensors(lambda x: tensors.update({f"{rank}/{len(tensors)}": x.cpu()}), to_plain(state))
    dcp.save(tensors or {f"{rank}/none": torch.zeros(1, device="cpu")}, checkpoint_id=directory / KEY / name)


def resume(sync: ShardedModelSync, saved: Any, strategy: RunningStrategy, path: Path, name: str = "") -> None:
    """Continues from the state in a checkpoint, between two backwards. All ranks must call it.

    Args:
        sync: of an attached model.
        saved: what the checkpoint in ``path`` holds for the module ``name``; None if nothing.
        strategy: that ``sync`` belongs to.
        path: a directory or a file.
        name: as `save_in_directory` had it.
    """
    gradients = sync.gradients
    if saved is None and gradients is None:
        return
    compressor = None if gradients is None else gradients.compressor
    columns = _columns(sync)

    def init(index: int, names: tuple[str, ...], layout: UnitLayout) -> tuple[State, torch.device]:
        assert gradients is not None
        assert compressor is not None
        unit = gradients.units[index] if index < len(gradients.units) else None
        own = {} if unit is None else {column.name: column for column in unit.columns}
        if unit is None or not own.keys() >= {*names} or layout != layout_of([own[x] for x in names], unit.num_shards):
            raise CheckpointError("it was saved with other units")
        return compressor.init(layout.numel, layout.num_shards, unit.device, unit.first_seed), unit.device

    open_saved = partial(_open, columns=columns, directory=path / KEY / name if path.is_dir() else None)
    state = read_state(saved, strategy, compressor, open_saved)
    sync.resume(agree_on_state(state, compressor, init, {name: column.shape for name, column in columns.items()}))


def _columns(sync: ShardedModelSync) -> dict[str, Column]:
    """Returns the parameters whose gradients are reduce-scattered, by name."""
    assert sync.model is not None
    try:
        return {column.name: column for _, columns in sharded_units(sync.model) for column in columns}
    except OptionError:  # without a comm_hook a model may be sharded in ways that comm_hook does not support
        return {}


def _open(saved: Any, *, columns: Mapping[str, Column], directory: Path | None) -> SavedState:
    """Opens what a checkpoint holds, in any version; ``directory`` has the tensors, if the checkpoint is one."""
    if isinstance(saved, Mapping) and "sharded" in saved:
        with as_checkpoint_error():
            return _open_version_2(saved, columns, directory)
    return open_checkpoint(saved) if directory is None else open_checkpoint(saved, partial(_load_part, directory))


def _load_part(directory: Path, rank: int, part: Any) -> Any:
    """Returns a rank's part of a checkpoint, with the tensors that it wrote into the directory."""
    tensors: dict[str, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        return tensors.setdefault(f"{rank}/{len(tensors)}", torch.empty_like(tensor, device="cpu"))

    part = map_tensors(allocate, part)
    _load(tensors, directory)
    return part


def _load(tensors: dict[str, Tensor], directory: Path) -> None:
    """Reads the named tensors of a directory into ``tensors``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
            dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(f"its tensors cannot be read from {directory} ({error})") from error


def _open_version_2(saved: Mapping[str, Any], columns: Mapping[str, Column], directory: Path | None) -> SavedState:
    """Opens a state of version 1 or 2, which did not have the shapes of parameters, nor the number of syncs."""
    version, config, num_shards = saved["version"], saved["sharded"], saved["num_shards"]
    if version not in (1, 2):
        raise CheckpointError(f"its version is {version!r}")
    if any(name not in columns for names in saved["units"].values() for name in names):
        raise CheckpointError("it was saved with other parameters")

    def load(rank: int) -> dict[str, Any]:
        by_unit = saved["ranks"][rank] if directory is None else _load_version_2(directory, rank)
        states = []
        for index, unit in enumerate(num_shards):
            if unit in saved["units"]:
                names, state = saved["units"][unit], dict(by_unit[unit])
                if version == 1 and "seed" in state:  # version 1 had seeds that were not unique
                    num_steps = int(state["seed"]) - (index << 24) - (rank % num_shards[unit] << 16)
                    state["seed"] = torch.tensor(first_seed(index, rank) + num_steps, device="cpu")
                layout = layout_of([columns[name] for name in names], num_shards[unit])
                states.append((index, (tuple(names), layout, state)))
        return to_plain(CommState(buckets=dict(states)))

    description = config["described"] if "described" in config else json.dumps(config, sort_keys=True)
    return SavedState("units", description, 0, saved["num_ranks"], load)


def _load_version_2(directory: Path, rank: int) -> dict[str, dict[str, Tensor]]:
    """Returns a rank's state, by unit, in a directory of version 1 or 2 with the keys ``<rank>/<unit>/<name>``."""
    prefix, tensors = f"{rank}/", dict[str, Tensor]()
    for key, its in dcp.FileSystemReader(directory).read_metadata().state_dict_metadata.items():
        if key.startswith(prefix) and isinstance(its, TensorStorageMetadata):
            tensors[key] = torch.empty(its.size, dtype=its.properties.dtype, device="cpu")
    _load(tensors, directory)
    by_unit: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        unit, _, name = key.removeprefix(prefix).rpartition("/")
        by_unit.setdefault(unit, {})[name] = tensor
    return by_unit
