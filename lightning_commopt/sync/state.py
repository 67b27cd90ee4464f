"""The state of gradient sync: compressor states and residuals, and how Lightning's checkpoints hold them."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from lightning_commopt.compressors import Compressor, Layout, State
from lightning_commopt.compressors.base import as_real
from lightning_commopt.compressors.configs import compressor_from_config, compressor_to_config, without_imports
from lightning_commopt.sync.gather import all_ranks_ready, gather_on_rank_0, map_tensors
from lightning_commopt.sync.strategies import RunningStrategy
from lightning_commopt.text.formatting import list_some, numbers_text
from lightning_commopt.text.validation import info, warn

KEY = "lightning_commopt"
"""Of a checkpoint."""

_VERSION = 2
_READABLE = (_VERSION - 1, _VERSION)  # 1 has the keys of 2; who raises the version translates those of the one before
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
}
"""Of buckets, by the name in a checkpoint: nothing else that a file names is looked up in torch."""
_PATIENCE_S = 60.0

BucketStates = dict[int, tuple[tuple[str, ...], Layout, State]]
"""By the index of a bucket: the names of its parameters, its layout, the compressor's state."""


class CheckpointError(ValueError):
    """A checkpoint's state of gradient sync cannot be used; the message has the reason."""


@dataclass
class CommState:
    """One rank's state of gradient sync."""

    compressor: Compressor | None = None
    num_syncs: int = 0
    buckets: BucketStates = field(default_factory=dict)  # the compressor's states
    residuals: dict[str, Tensor] = field(default_factory=dict)  # by parameter name, those that are not in the states
    is_common: bool = False  # the same on all ranks, without states and residuals

    def on_cpu(self) -> CommState:
        """Returns the same in the host's memory, copied only if it is elsewhere."""
        buckets = {
            index: (names, layout, map_tensors(torch.Tensor.cpu, state))
            for index, (names, layout, state) in self.buckets.items()
        }
        return replace(self, buckets=buckets, residuals=map_tensors(torch.Tensor.cpu, self.residuals))

    def all_residuals(self) -> dict[str, Tensor]:
        """Returns this rank's residuals, by parameter name; raises a CheckpointError if the states are damaged."""
        with _as_checkpoint_error():
            return residuals_by_name(self.compressor, self.buckets, self.residuals)


def residuals_by_name(
    compressor: Compressor | None, buckets: BucketStates, besides: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the residuals of states, by parameter name, added to ``besides``."""
    residuals = dict(besides)
    for names, layout, state in buckets.values():
        residual = compressor.residual(layout, state) if compressor is not None else None
        if residual is not None:
            for name, part in zip(names, layout.split(residual), strict=True):
                residuals[name] = residuals[name] + part if name in residuals else part
    return residuals


def to_plain(state: CommState) -> dict[str, Any]:
    """Returns one rank's part of a checkpoint: dicts and lists of tensors, numbers and strings."""
    buckets = [
        {
            "index": index,
            "names": list(names),
            "shapes": [list(shape) for shape in layout.shapes],
            "strides": [list(stride) for stride in layout.strides],
            "dtype": str(layout.dtype).removeprefix("torch."),
            "state": its_state,
        }
        for index, (names, layout, its_state) in state.buckets.items()
    ]
    return {"buckets": buckets, "residuals": state.residuals}


def to_checkpoint(compressor: Compressor | None, num_syncs: int, ranks: list[Any]) -> dict[str, Any]:
    """Returns what a checkpoint holds: the parts of all ranks, from `to_plain`, and what they share."""
    description = _to_description(compressor)
    return {"version": _VERSION, "compressor": description, "num_syncs": num_syncs, "ranks": ranks}


def from_checkpoint(saved: Any, rank: int, world_size: int, compressor: Compressor | None) -> CommState:
    """Returns one rank's state in a checkpoint, ``saved`` by `to_checkpoint`.

    If the number of ranks has changed: the mean of the old ranks' residuals, so that the mean over the new ones is the
    same, and no states, which belong to a rank. The ``compressor`` in use is recognised even if its class has no name.

    Raises:
        CheckpointError: ``saved`` is damaged, neither from this version nor from the one before, or of a compressor
            that is not known.
    """
    check_version(saved, _READABLE)
    with _as_checkpoint_error():
        its_compressor = _from_description(saved["compressor"], compressor)
        num_syncs = int(saved["num_syncs"])
        parts = saved["ranks"]
        if not parts:
            return CommState(None, num_syncs, is_common=True)
        if len(parts) == world_size:
            return _from_plain(parts[rank], its_compressor, num_syncs)
        mean: dict[str, Tensor] = {}
        for part in parts:
            for name, residual in _from_plain(part, its_compressor, num_syncs).all_residuals().items():
                share = residual.to(torch.promote_types(residual.dtype, torch.float32)) / len(parts)
                mean[name] = mean[name] + share if name in mean else share
    return CommState(its_compressor, num_syncs, {}, mean)


def check_version(saved: Any, readable: Sequence[int]) -> None:
    """Raises a CheckpointError unless a checkpoint's part is a mapping of a version that is ``readable``."""
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if type(version) is not int or version not in readable:
        raise CheckpointError(f"its version is {version!r}, and those that can be read are {numbers_text(readable)}")


def adopt_states(state: CommState, compressor: Compressor, module: Module) -> BucketStates:
    """Returns saved states on the device of the parameters; a CheckpointError if the compressor cannot use them."""
    if state.compressor is None:
        return {}
    if state.compressor != compressor:
        raise CheckpointError(f"it was saved with {state.compressor}")
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    buckets: BucketStates = {}
    for index, (names, layout, saved) in state.buckets.items():
        shapes = tuple(as_real(parameters[name]).shape if name in parameters else None for name in names)
        if shapes != layout.shapes:
            raise CheckpointError("it was saved with other parameters")
        device = parameters[names[0]].device
        with _as_checkpoint_error():
            buckets[index] = names, layout, fit_to(saved, compressor.init(layout, device, state.num_syncs), device)
    return buckets


@contextmanager
def _as_checkpoint_error() -> Generator[None, None, None]:
    """Turns every error about the contents of a file into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})") from error


def _to_description(compressor: Compressor | None) -> str:
    if compressor is None:
        return "null"
    try:
        return json.dumps(compressor_to_config(compressor), sort_keys=True)
    except (ValueError, TypeError):
        return repr(compressor)


def _from_description(description: str, candidate: Compressor | None) -> Compressor | None:
    if description == _to_description(candidate):
        return candidate
    try:
        with without_imports():  # a checkpoint may be anybody's
            return compressor_from_config(json.loads(description))
    except (ValueError, TypeError):
        raise CheckpointError(f"its compressor is not known: {description}") from None


def _from_plain(part: dict[str, Any], compressor: Compressor | None, num_syncs: int) -> CommState:
    buckets: BucketStates = {}
    for bucket in part["buckets"]:
        layout = Layout(
            tuple(torch.Size(shape) for shape in bucket["shapes"]),
            tuple(tuple(stride) for stride in bucket["strides"]),
            _DTYPES[bucket["dtype"]],
        )
        names = tuple(bucket["names"])
        if not len(names) == len(layout.shapes) == len(layout.strides):
            raise CheckpointError(f"bucket {bucket['index']} has {len(names)} names for {len(layout.shapes)} shapes")
        buckets[bucket["index"]] = names, layout, bucket["state"]
    return CommState(compressor, num_syncs, buckets, dict(part["residuals"]))


def fit_to(saved: Any, fresh: Any, device: torch.device) -> Any:
    """Returns ``saved``, of the structure of ``fresh``, on its devices; other entries of a dict go to ``device``."""
    if isinstance(fresh, Tensor):
        if not isinstance(saved, Tensor) or (saved.shape, saved.dtype) != (fresh.shape, fresh.dtype):
            raise CheckpointError(f"a state has {_kind(saved)} where {_kind(fresh)} is expected")
        return saved.to(fresh.device)
    if isinstance(fresh, dict) and isinstance(saved, dict) and fresh.keys() <= saved.keys():
        return {
            key: fit_to(value, fresh[key], device) if key in fresh else map_tensors(lambda x: x.to(device), value)
            for key, value in saved.items()
        }
    if isinstance(fresh, list) and isinstance(saved, list) and len(fresh) == len(saved):
        return [fit_to(*pair, device) for pair in zip(saved, fresh, strict=True)]
    if isinstance(fresh, dict | list) or type(saved) is not type(fresh):
        raise CheckpointError(f"a state has {_kind(saved)} where {_kind(fresh)} is expected")
    return saved


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of {tuple(value.shape)}"
    return f"{type(value).__name__} of {list(value)}" if isinstance(value, dict) else type(value).__name__


def gather_state(state: CommState | None, strategy: RunningStrategy, *, is_in_batch: bool) -> dict[str, Any] | None:
    """Gathers all ranks' states for a checkpoint, on rank 0, which writes it. All ranks should call it.

    If an exception or a signal keeps some ranks from calling it between two batches, it warns and returns None.
    """
    if state is None:
        return None
    if state.is_common or strategy.world_size == 1:
        parts = [] if state.is_common else [to_plain(state.on_cpu())]
        return to_checkpoint(state.compressor, state.num_syncs, parts)
    position = None if is_in_batch else str(state.num_syncs)
    timeout_s = strategy.timeout.total_seconds()
    if not dist.is_initialized() or not all_ranks_ready(position, min(_PATIENCE_S, timeout_s), timeout_s):
        warn(
            "A checkpoint is saved without the state of comm_hook: not all ranks saved it between the same two batches."
        )
        return None
    ranks = gather_on_rank_0(to_plain(state), strategy.root_device)
    return None if ranks is None else to_checkpoint(state.compressor, state.num_syncs, ranks)


def read_state(saved: Any, strategy: RunningStrategy, compressor: Compressor | None) -> CommState:
    """Returns this rank's state from `gather_state`; an empty one, with a warning, if it cannot be used."""
    if saved is None:
        return CommState(is_common=True)
    try:
        return from_checkpoint(saved, strategy.global_rank, strategy.world_size, compressor)
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
