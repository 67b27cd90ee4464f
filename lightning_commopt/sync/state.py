"""The state of gradient sync: what a compressor keeps from step to step, and what all ranks resume from.

A state belongs to DDP's buckets or to FSDP2's units. Both hold residuals, and these belong to parameters. Therefore
residuals can move to other buckets, other units, another compressor, or the other strategy.
``docs/how_to/resume.md`` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

from lightning_commopt.compressors import Compressor, Layout, ShardedCompressor, State
from lightning_commopt.sync.gather import map_tensors, values_of_all_ranks
from lightning_commopt.sync.unit_layout import UnitLayout
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import info, warn

L = TypeVar("L", bound=Layout | UnitLayout, default=Layout)
"""The layout of DDP's buckets, or of FSDP2's units."""

Names = tuple[str, ...]
AnyCompressor = Compressor | ShardedCompressor
BucketStates = dict[int, tuple[Names, L, State]]
"""Maps the index of a bucket or unit to the names of its parameters, its layout and the compressor's state."""


class CheckpointError(ValueError):
    """A checkpoint's state of gradient sync cannot be used. The message is the reason, with "it" for the state."""


@contextmanager
def as_checkpoint_error() -> Generator[None, None, None]:
    """Turns every error about the contents of a file into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"it is damaged ({type(error).__name__}: {error})") from error


@dataclass
class CommState(Generic[L]):
    """One rank's state of gradient sync.

    Attributes:
        compressor: the compressor that ``buckets`` belong to; None without one.
        num_syncs: number of gradient syncs so far.
        buckets: states of DDP's buckets, or of FSDP2's units.
        residuals: residuals that are in none of these states, by parameter name.
        is_common: whether only ``num_syncs`` is set, which is the same on all ranks.
        damage: why a checkpoint's state cannot be used at all; "" if it can.
    """

    compressor: AnyCompressor | None = None
    num_syncs: int = 0
    buckets: BucketStates[L] = field(default_factory=dict)
    residuals: dict[str, Tensor] = field(default_factory=dict)
    is_common: bool = False
    damage: str = ""

    def on_cpu(self) -> CommState[L]:
        """Returns this state in the host's memory. Tensors that are there already are not copied."""
        buckets = {
            index: (names, layout, map_tensors(torch.Tensor.cpu, state))
            for index, (names, layout, state) in self.buckets.items()
        }
        return replace(self, buckets=buckets, residuals=map_tensors(torch.Tensor.cpu, self.residuals))

    def all_residuals(self) -> dict[str, Tensor]:
        """Returns this rank's residuals, by parameter name; raises a CheckpointError if the states are damaged."""
        with as_checkpoint_error():
            return residuals_by_name(self.compressor, self.buckets, self.residuals)


AnyState = CommState[Layout] | CommState[UnitLayout]


def residuals_by_name(
    compressor: AnyCompressor | None, buckets: BucketStates[L], others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the residuals in ``buckets``, by parameter name and in the parameter's shape, added to ``others``."""
    residuals = dict(others)
    for names, layout, state in buckets.values():
        residual = _residual(compressor, layout, state)
        if residual is not None:
            for name, part in zip(names, layout.split(residual), strict=True):
                residuals[name] = residuals[name] + part if name in residuals else part
    return residuals


def _residual(compressor: AnyCompressor | None, layout: Layout | UnitLayout, state: State) -> Tensor | None:
    if isinstance(compressor, ShardedCompressor):
        assert isinstance(layout, UnitLayout)
        return compressor.residual(state, layout.numel, layout.num_shards)
    assert isinstance(layout, Layout)
    return None if compressor is None else compressor.residual(layout, state)


def agree_on_state(
    state: AnyState,
    compressor: AnyCompressor | None,
    init: Callable[[int, Names, L], tuple[State, torch.device]],
    shapes: Mapping[str, torch.Size],
) -> CommState[L]:
    """Returns the state that this rank resumes from. All ranks must call it, and use the same parts of their states.

    If the states of all ranks fit, all use them. If the state of some rank is damaged, none is used, with a warning.
    Otherwise all use only the residuals.

    Args:
        state: this rank's state from a checkpoint.
        compressor: the compressor in use; None without one.
        init: returns a new state, and the device of the gradients, for a bucket or unit with this index, names and
            layout; or raises a `CheckpointError` if the model has no such bucket or unit.
        shapes: shapes of the parameters that can have residuals, by name.
    """
    buckets: BucketStates[L] = {}
    obstacle, damage, residuals = "", state.damage, state.residuals
    try:
        buckets = _fit_all(state, compressor, init)
    except CheckpointError as error:
        obstacle = str(error)
        try:
            residuals = state.all_residuals()
        except CheckpointError as error_of_residuals:
            damage = damage or str(error_of_residuals)
    by_rank = values_of_all_ranks((state.num_syncs, damage, bool(obstacle), sorted(buckets)))
    damage = next((rank_damage for _, rank_damage, _, _ in by_rank if rank_damage), "")
    if damage:
        warn(f"The checkpoint's state of comm_hook cannot be used, because {damage}: it starts from zero.")
        return CommState(compressor)
    if obstacle and state.buckets:
        info(f"Of the checkpoint's state of comm_hook only the residuals are used, because {obstacle}.")
    elif not obstacle and any(other != by_rank[0] for other in by_rank):  # the states do not fit on another rank
        buckets, residuals = {}, state.all_residuals()
    num_syncs = max(number for number, _, _, _ in by_rank)
    return CommState(compressor, num_syncs, buckets, _select_known(residuals, shapes))


def _fit_all(
    state: AnyState,
    compressor: AnyCompressor | None,
    init: Callable[[int, Names, L], tuple[State, torch.device]],
) -> BucketStates[L]:
    """Returns saved states on the device of the gradients; raises a CheckpointError if they do not fit."""
    if state.compressor != compressor:
        raise CheckpointError(f"it was saved with {state.compressor}")
    buckets: BucketStates[L] = {}
    for index, (names, layout, saved) in cast("CommState[L]", state).buckets.items():
        with as_checkpoint_error():
            buckets[index] = names, layout, _fit(saved, *init(index, names, layout))
    return buckets


def _fit(saved: Any, fresh: Any, device: torch.device) -> Any:
    """Returns ``saved`` on the devices of ``fresh``, whose structure it must have.

    A dict may have additional entries, which go to ``device``.
    """
    is_tensor = isinstance(fresh, Tensor) and isinstance(saved, Tensor)
    if is_tensor and (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype):
        return saved.to(fresh.device)
    if isinstance(fresh, dict) and isinstance(saved, dict) and fresh.keys() <= saved.keys():
        return {
            key: _fit(value, fresh[key], device) if key in fresh else map_tensors(lambda x: x.to(device), value)
            for key, value in saved.items()
        }
    if isinstance(fresh, list) and isinstance(saved, list) and len(fresh) == len(saved):
        return [_fit(*pair, device) for pair in zip(saved, fresh, strict=True)]
    if type(saved) is type(fresh) and not isinstance(fresh, Tensor | dict | list):
        return saved
    raise CheckpointError(f"a state has {_kind(saved)} where {_kind(fresh)} is expected")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of {tuple(value.shape)}"
    return f"{type(value).__name__} of {list(value)}" if isinstance(value, dict) else type(value).__name__


def _select_known(residuals: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    unknown = [name for name, value in residuals.items() if shapes.get(name) != value.shape]
    if unknown:
        warn(
            f"comm_hook: residuals of {len(unknown)} parameters in the checkpoint are dropped, because no parameter of"
            f" that name and shape is synchronized here: {list_some(unknown, 8)}."
        )
    return {name: value for name, value in residuals.items() if name not in unknown}
