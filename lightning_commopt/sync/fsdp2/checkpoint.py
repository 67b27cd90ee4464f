"""The state of compressed reduce-scatters in checkpoints: a directory (DCP) in that of the model, or part of one file.

A directory holds tensors under keys of our own, ``<rank>/<unit>/<name>``, in a folder of its own: whoever reads the
model does not see them. What is common to all ranks is a plain dict in the checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_commopt.compressors.configs import compressor_to_config, sharded_from_config, without_imports
from lightning_commopt.compressors.shards import ShardedCompressor
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.state import KEY, CheckpointError, check_version
from lightning_commopt.text.validation import info, warn

_VERSION = 2
_READABLE = (_VERSION - 1, _VERSION)

RankState = dict[str, dict[str, Tensor]]  # by unit: the tensors of the compressor's state


def describe(sync: ShardedSync) -> dict[str, Any]:
    """Returns what a checkpoint must say of the states of all ranks."""
    return {
        "version": _VERSION,
        "sharded": _config_of(sync.compressor),
        "num_ranks": dist.get_world_size(),
        "num_shards": {unit.name: unit.num_shards for unit in sync.units},
        "units": {name: saved["names"] for name, saved in sync.state().items()},
    }


def save_in_directory(sync: ShardedSync, directory: Path, name: str = "") -> None:
    """Writes this rank's state into the directory of a checkpoint, of the module of that name there.

    All ranks must call it.
    """
    rank = dist.get_rank()
    tensors = {f"{rank}/{unit}/{key}": x.cpu() for unit, state in rank_state(sync).items() for key, x in state.items()}
    dcp.save(tensors or {f"{rank}/none": torch.zeros(1, device="cpu")}, checkpoint_id=directory / KEY / name)


def restore(sync: ShardedSync, saved: Any, directory: Path | None, name: str = "") -> None:
    """Continues from a checkpoint, before the first backward. All ranks must call it.

    With as many ranks each gets its state. With more or fewer, or another compressor, each gets the mean of all ranks'
    residuals, so that what is still to be sent of the mean gradient stays the same. ``saved`` is from `describe`, in a
    file with ``ranks``, a `rank_state` of each; ``directory`` is that of the checkpoint, None if it is a file.
    """
    try:
        if not isinstance(saved, Mapping) or "sharded" not in saved:
            raise CheckpointError("it is of DDP")
        check_version(saved, _READABLE)
        ranks = saved.get("ranks")
        load: Callable[[int], RankState]
        if directory is not None:
            load = partial(_load_from, directory / KEY / name)
        elif isinstance(ranks, list):
            load = ranks.__getitem__
        else:
            raise CheckpointError("it has no states of ranks")
        _restore(sync, saved, load)
    except (CheckpointError, KeyError, TypeError, ValueError, OSError) as error:
        warn(f"The state of comm_hook in the checkpoint is not used ({type(error).__name__}: {error}).")


def _restore(sync: ShardedSync, saved: Mapping[str, Any], load: Callable[[int], RankState]) -> None:
    num_shards = {unit.name: unit.num_shards for unit in sync.units}
    is_same = saved["sharded"] in (_config_of(sync.compressor), _description_of(sync.compressor))
    if is_same and (saved["num_shards"], saved["num_ranks"]) == (num_shards, dist.get_world_size()):
        state = load(dist.get_rank())
        if saved["version"] == 1:
            _renew_seeds(sync, state)
        sync.restore({unit: {"names": names, "state": state[unit]} for unit, names in saved["units"].items()})
        return
    with without_imports():
        compressor = sync.compressor if is_same else sharded_from_config(saved["sharded"])
    if compressor is None or not compressor.claims.keeps_residual:
        return
    info("Only the residuals of the checkpoint's state of comm_hook are used, as its ranks or options were others.")
    mean: dict[str, Tensor] = {}
    for rank in range(saved["num_ranks"]):
        for name, residual in _residuals(sync, saved, compressor, load(rank)).items():
            share = residual / saved["num_ranks"]
            mean[name] = mean[name] + share if name in mean else share
    sync.add_residuals(mean)


def _config_of(compressor: ShardedCompressor) -> dict[str, Any]:
    """Returns what an equal compressor can be made from; a description where there is nothing of the kind."""
    try:
        return compressor_to_config(compressor)
    except ValueError:
        return _description_of(compressor)


def _description_of(compressor: ShardedCompressor) -> dict[str, Any]:
    """Returns what an equal compressor of a class without a name can be recognized by."""
    cls = type(compressor)
    return {"name": f"{cls.__module__}.{cls.__qualname__}", "described": repr(compressor)}


def _renew_seeds(sync: ShardedSync, state: RankState) -> None:
    """Gives the states of version 1 seeds of this version, for as many steps: theirs were not unique."""
    for index, unit in enumerate(sync.units):
        if "seed" in (its_state := state.get(unit.name, {})):
            num_steps = int(its_state["seed"]) - (index << 24) - (unit.group.rank() << 16)
            its_state["seed"] = torch.tensor(unit.first_seed + num_steps, dtype=torch.int64, device="cpu")


def _residuals(
    sync: ShardedSync, saved: Mapping[str, Any], compressor: ShardedCompressor, state: RankState
) -> dict[str, Tensor]:
    """Returns what a rank of the checkpoint had not sent, by the names of parameters that the model still has."""
    columns = {column.name: column for unit in sync.units for column in unit.columns}
    residuals = {}
    for unit, names in saved["units"].items():
        if any(name not in columns for name in names):
            raise CheckpointError("it was saved with other parameters")
        num_shards = saved["num_shards"][unit]
        widths = [columns[name].width(num_shards) for name in names]
        rows = compressor.residual(state[unit], sum(widths), num_shards)
        assert rows is not None
        for name, its_rows in zip(names, rows.split(widths, 1), strict=True):
            residuals[name] = columns[name].whole(its_rows)
    return residuals


def rank_state(sync: ShardedSync) -> RankState:
    """Returns the tensors of this rank, not copied."""
    return {unit: dict(saved["state"]) for unit, saved in sync.state().items()}


def _load_from(directory: Path, rank: int) -> RankState:
    """Returns the state of a rank in a checkpoint's directory."""
    prefix, tensors = f"{rank}/", {}
    for key, its in dcp.FileSystemReader(directory).read_metadata().state_dict_metadata.items():
        if key.startswith(prefix) and isinstance(its, TensorStorageMetadata):
            tensors[key] = torch.empty(its.size, dtype=its.properties.dtype, device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
        dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    state: RankState = {}
    for key, tensor in tensors.items():
        unit, _, name = key.removeprefix(prefix).rpartition("/")
        if unit:
            state.setdefault(unit, {})[name] = tensor
    return state
