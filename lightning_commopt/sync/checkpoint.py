"""The state of gradient sync in a checkpoint, format version 3: how it is gathered, written and read.

It is one mapping under the key ``lightning_commopt`` of the checkpoint, in Fabric one for each module:

- ``version``: 3;
- ``kind``: "buckets" for DDP, "units" for FSDP2;
- ``num_syncs``: number of gradient syncs so far;
- ``compressor``: its configuration as JSON, or its ``repr`` if its class is not registered under a name;
- ``ranks``: for each rank ``states`` and ``residuals``; empty if only ``num_syncs`` needs to be saved. Each state has
  the ``index``, the ``names`` and ``shapes`` of the parameters, and the compressor's ``state`` of a bucket or unit; a
  bucket also ``strides`` and ``dtype``; a unit also ``dims``, in which the parameters are sharded, and ``num_shards``.
  ``residuals`` has those that are in no state;
- ``checksum``: the CRC-32 of all entries above, with the dtype and shape in place of each tensor.

Values are tensors, numbers, strings, lists and dicts, so that ``torch.load(weights_only=True)`` reads them. In a
directory the mapping is in Lightning's ``meta.pt``, with tensors on the meta device. The real ones are in the folder
``lightning_commopt`` under the keys ``<rank>/<number>``, numbered in the order of the mapping.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors import Layout, ShardedCompressor
from lightning_commopt.compressors.configs import (
    compressor_from_config,
    compressor_to_config,
    sharded_from_config,
    without_imports,
)
from lightning_commopt.sync.gather import all_ranks_ready, gather_on_rank_0, map_tensors
from lightning_commopt.sync.state import (
    AnyCompressor,
    AnyState,
    BucketStates,
    CheckpointError,
    CommState,
    as_checkpoint_error,
)
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.sync.unit_layout import UnitLayout
from lightning_commopt.text.formatting import lasting_repr
from lightning_commopt.text.validation import warn

KEY = "lightning_commopt"
"""The key of a checkpoint, and in a directory also the folder, that holds the state of gradient sync."""

DILOCO_KIND = "diloco"
"""The ``kind`` of a state that only `lightning_commopt.sync.diloco.checkpoint` can read."""

_VERSION = 3
_CONTENT = ("version", "kind", "compressor", "num_syncs", "ranks")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
}
"""The dtypes of buckets by their names in a checkpoint, so that no name in a file is looked up in torch."""
_PATIENCE_S = 60.0
"""Time that rank 0 waits for the others at a checkpoint, unless the group's timeout is shorter. If some do not save
it, the checkpoint is delayed by as much."""


def to_plain(state: AnyState) -> dict[str, Any]:
    """Returns one rank's entry of ``ranks`` in a checkpoint."""
    states = [
        {"index": index, "names": list(names), **_layout_to_plain(layout), "state": bucket_state}
        for index, (names, layout, bucket_state) in state.buckets.items()
    ]
    return {"states": states, "residuals": state.residuals}


def _layout_to_plain(layout: Layout | UnitLayout) -> dict[str, Any]:
    shapes = [list(shape) for shape in layout.shapes]
    if isinstance(layout, UnitLayout):
        return {"shapes": shapes, "dims": list(layout.dims), "num_shards": layout.num_shards}
    strides = [list(stride) for stride in layout.strides]
    return {"shapes": shapes, "strides": strides, "dtype": str(layout.dtype).removeprefix("torch.")}


def to_checkpoint(compressor: AnyCompressor | None, num_syncs: int, ranks: list[Any]) -> dict[str, Any]:
    """Returns the mapping for a checkpoint. ``ranks`` has what `to_plain` returned on each rank."""
    kind = "units" if isinstance(compressor, ShardedCompressor) else "buckets"
    content = dict(zip(_CONTENT, (_VERSION, kind, describe_compressor(compressor), num_syncs, ranks), strict=True))
    return {**content, "checksum": _checksum(content)}


def _checksum(saved: Mapping[str, Any]) -> int:
    """Returns a number that changes with every key and value, and with every tensor's dtype and shape."""
    plain = map_tensors(lambda x: f"{x.dtype} {tuple(x.shape)}", [saved[key] for key in _CONTENT])
    return zlib.crc32(repr(plain).encode())


def describe_compressor(compressor: AnyCompressor | None) -> str:
    """Returns a compressor's configuration as JSON, or its ``repr`` if its class cannot be found by a name."""
    if compressor is None:
        return "null"
    try:
        return json.dumps(compressor_to_config(compressor), sort_keys=True)
    except (ValueError, TypeError):
        return lasting_repr(compressor)


@dataclass(frozen=True)
class SavedState:
    """The state of all ranks in a checkpoint.

    Attributes:
        kind: "buckets" or "units".
        compressor: the compressor that saved it, from `describe_compressor`.
        num_syncs: number of gradient syncs before it was saved.
        num_ranks: number of ranks with a state; 0 if only ``num_syncs`` was saved.
        load: returns the part of one rank, as `to_plain` does.
    """

    kind: str
    compressor: str
    num_syncs: int
    num_ranks: int
    load: Callable[[int], Any]

    def of_rank(self, rank: int, world_size: int, in_use: AnyCompressor | None) -> AnyState:
        """Returns the state that one of ``world_size`` ranks resumes from; raises a CheckpointError if it is damaged.

        If a different number of ranks has saved it, every rank gets the mean of the saved residuals, which keeps the
        mean over all ranks, and no states, since these belong to one rank each. The compressor ``in_use`` is recognized
        even if its class is not registered under a name.
        """
        if not self.num_ranks:
            return CommState(None, self.num_syncs, is_common=True)
        with as_checkpoint_error():
            compressor = self._find_compressor(in_use)
            if self.num_ranks == world_size:
                return self._saved_by(rank, compressor)
            mean: dict[str, Tensor] = {}
            for saved_rank in range(self.num_ranks):
                for name, residual in self._saved_by(saved_rank, compressor).all_residuals().items():
                    share = residual.to(torch.promote_types(residual.dtype, torch.float32)) / self.num_ranks
                    mean[name] = mean[name] + share if name in mean else share
        return CommState(compressor, self.num_syncs, {}, mean)

    def _find_compressor(self, in_use: AnyCompressor | None) -> AnyCompressor | None:
        is_of_units = self.kind == "units"
        if is_of_units == isinstance(in_use, ShardedCompressor) and self.compressor == describe_compressor(in_use):
            return in_use
        try:
            with without_imports():  # a checkpoint may come from anybody, so it must not choose what is imported
                config = json.loads(self.compressor)
                return sharded_from_config(config) if is_of_units else compressor_from_config(config)
        except (ValueError, TypeError):
            raise CheckpointError(f"its compressor is not registered: {self.compressor}") from None

    def _saved_by(self, rank: int, compressor: AnyCompressor | None) -> AnyState:
        part = self.load(rank)
        residuals = {name: residual for name, residual in part["residuals"].items() if isinstance(residual, Tensor)}
        if len(residuals) != len(part["residuals"]):
            raise CheckpointError("it has residuals that are not tensors")
        layout_from_plain = _unit_layout if self.kind == "units" else _bucket_layout
        buckets: BucketStates[Any] = {}
        for saved in part["states"]:
            index, names, layout = saved["index"], tuple(saved["names"]), layout_from_plain(saved)
            if type(index) is not int or len(names) != len(layout.shapes):
                raise CheckpointError(f"bucket {index!r} has {len(names)} names for {len(layout.shapes)} shapes")
            buckets[index] = names, layout, saved["state"]
        return CommState(compressor, self.num_syncs, buckets, residuals)


def _bucket_layout(saved: Mapping[str, Any]) -> Layout:
    strides = tuple(tuple(stride) for stride in saved["strides"])
    layout = Layout(_shapes(saved), strides, _DTYPES[saved["dtype"]])
    layout.split(torch.empty(layout.numel, device="meta"))  # raises if the strides do not fit
    return layout


def _unit_layout(saved: Mapping[str, Any]) -> UnitLayout:
    return UnitLayout(_shapes(saved), tuple(saved["dims"]), saved["num_shards"])


def _shapes(saved: Mapping[str, Any]) -> tuple[torch.Size, ...]:
    return tuple(torch.Size(shape) for shape in saved["shapes"])


def _check_in_file(rank: int, part: Any) -> Any:
    """Returns a rank's part of a checkpoint that is a file; raises a CheckpointError if its tensors are elsewhere."""

    def check(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            raise CheckpointError(f"its tensors are in the folder {KEY} of the directory that this file was made from")
        return tensor

    return map_tensors(check, part)


def open_checkpoint(saved: Any, load: Callable[[int, Any], Any] = _check_in_file) -> SavedState:
    """Returns the state in a checkpoint, from `to_checkpoint`.

    Args:
        saved: what the checkpoint has under `KEY`.
        load: returns the part of a rank, given the rank and its entry in ``saved``.

    Raises:
        CheckpointError: ``saved`` is damaged or of another version.
    """
    version, kind = (saved.get("version"), saved.get("kind")) if isinstance(saved, Mapping) else (None, None)
    if kind == DILOCO_KIND:
        raise CheckpointError("it was saved by CommOptDiLoCo, and only CommOptDiLoCo can resume from it")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(f"its version is {version!r}, but only version {_VERSION} can be read")
    with as_checkpoint_error():
        if saved["checksum"] != _checksum(saved):
            raise CheckpointError("it is damaged (its checksum differs)")
        num_syncs, ranks = saved["num_syncs"], saved["ranks"]
        if type(num_syncs) is not int or num_syncs < 0 or not isinstance(ranks, list):
            raise CheckpointError(f"it is damaged ({num_syncs!r} gradient syncs)")
        return SavedState(
            saved["kind"], saved["compressor"], num_syncs, len(ranks), lambda rank: load(rank, ranks[rank])
        )


def read_state(
    saved: Any,
    strategy: RunningStrategy,
    in_use: AnyCompressor | None,
    open_saved: Callable[[Any], SavedState] = open_checkpoint,
) -> AnyState:
    """Returns this rank's state, for `agree_on_state`, from what `gather_state` has returned.

    It is empty if ``saved`` is None. A damaged one is returned with the reason in ``damage``, so that all ranks can
    agree not to use it.
    """
    if saved is None:
        return CommState(is_common=True)
    try:
        return open_saved(saved).of_rank(strategy.global_rank, strategy.world_size, in_use)
    except CheckpointError as error:
        return CommState(damage=str(error))


def gather_state(
    state: AnyState | None, strategy: RunningStrategy, *, can_save: bool, in_directory: bool = False
) -> dict[str, Any] | None:
    """Returns the mapping for a checkpoint, complete on rank 0, which writes it; None if there is nothing to save.

    All ranks should call it. If an exception or a signal keeps some from calling it between the same two batches, it
    warns, and returns None on all. On a rank within a batch no state can be saved, nor on one whose fit has failed,
    which the others probably do not know (``can_save=False``). With ``in_directory`` only the shapes of tensors are
    gathered, because each rank writes its own tensors.
    """
    if state is None:
        return None
    if state.is_common:
        return to_checkpoint(state.compressor, state.num_syncs, [])
    part = to_plain(state)
    if strategy.world_size == 1:
        return to_checkpoint(state.compressor, state.num_syncs, [map_tensors(Tensor.cpu, part)])
    if not all_ranks_save(str(state.num_syncs) if can_save else None, strategy):
        warn(
            "A checkpoint is saved without the state of comm_hook: not all ranks saved it between the same two batches."
        )
        return None
    if in_directory:
        ranks = [None] * strategy.world_size if strategy.global_rank == 0 else None
        dist.gather_object(map_tensors(lambda x: torch.empty_like(x, device="meta"), part), ranks)
    else:
        ranks = gather_on_rank_0(part, strategy.root_device)
    return to_checkpoint(state.compressor, state.num_syncs, ranks or [])


def all_ranks_save(position: str | None, strategy: RunningStrategy, patience_s: float = _PATIENCE_S) -> bool:
    """Returns whether all ranks save a checkpoint at the same point. An exception or a signal may prevent some.

    For ``position`` see `all_ranks_ready`. ``patience_s`` is the time by which ranks may be later than rank 0.
    """
    timeout_s = strategy.timeout.total_seconds()
    return dist.is_initialized() and all_ranks_ready(position, min(patience_s, timeout_s), timeout_s)


def states_of_modules(saved: Any, loaded: Collection[str]) -> Mapping[str, Any]:
    """Returns a Fabric checkpoint's states of modules, by their names; warns about names that are not ``loaded``."""
    states = saved if isinstance(saved, Mapping) else {}
    unused = [str(name) for name, state in states.items() if name not in loaded and _holds_tensors(state)]
    if unused or (saved is not None and not isinstance(saved, Mapping)):
        warn(
            f"The checkpoint's state of comm_hook for {', '.join(map(repr, unused)) or 'its modules'} is not used:"
            " no module is loaded under that name; its residuals start from zero. Pass the modules to fabric.load"
            " under the names that were used in fabric.save."
        )
    return states


def _holds_tensors(state: Any) -> bool:
    """Returns whether a part of a checkpoint is more than a number of gradient syncs; also for a damaged one."""
    return not isinstance(state, Mapping) or bool(state.get("ranks", True))
