"""Checkpoints of CommOptDiLoCo in Fabric: the files are those of a Trainer's, for the module in ``state``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from torch.nn import Module
from torch.optim import Optimizer

from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.strategy.fabric_diloco_unfinished import Unfinished
from lightning_commopt.strategy.started import StartsRanks
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.sync.diloco import checkpoint as files
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.diloco.state_dict import global_state_dict
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import warn

_T = TypeVar("_T")


class SavesRanksOfFabric(StartsRanks, DDPStrategy):
    """The part of a strategy with `Rounds` in Fabric that saves and resumes them.

    What a rank saves for itself is everything in ``state`` but the module: optimizers, schedulers, data loaders.

    Attributes:
        rounds: the exchanges of the module that is trained; None before there is one.
    """

    _plan: DiLoCoPlan
    _saves_comm_state: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds: Rounds | None = None
        self._module: Module | None = None  # the one in training
        self._early: tuple[Module, files.Saved] | None = None  # for a module that is yet to be set up
        self._unfinished: Unfinished | None = None  # made by the process that trains

    @abstractmethod
    def _begin(self, saved: files.Saved) -> None:
        """Begins rounds from the weights that the module has, or from what was saved. All ranks must call it."""

    def _gather(self, value: _T) -> list[_T]:
        """Returns the values of all ranks, in their order. All ranks must call it."""
        everyone = [value] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """Returns a module's state; of the one that is trained with the global weights and buffers."""
        if self.rounds is None or module is not self._module:
            return super().get_module_state_dict(module)
        return global_state_dict(module, self.rounds)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self.rounds is not None:
            self.rounds.meet()
        name = next((name for name, value in state.items() if value is self._module), None)
        if self._saves_comm_state and self.rounds is not None and name is not None and _has_optimizer(state):
            state, filter = self._convert_stateful_objects_in_state(state, filter or {}), None
            entries = {key: value for key, value in state.items() if key != name}
            if (common := self._save_rank(path, entries, storage_options)) is not None:
                state[KEY] = {name: common}
        super().save_checkpoint(path, state, storage_options=storage_options, filter=filter)

    def _save_rank(self, path: str | Path, entries: dict[str, Any], storage_options: Any) -> dict[str, Any] | None:
        """Writes the file of this rank; returns what all share, or None if ranks cannot resume exactly."""
        rounds = self.rounds
        assert rounds is not None
        assert self._module is not None
        # Names of files may have a rank's own numbers in them.
        has_changed = rounds.shows_final and not rounds.has_final(self._module)
        everyone = self._gather((str(path), uuid4().hex, rounds.num_steps, has_changed))
        common_path, identity, *_ = everyone[0]
        if any(has_changed for *_, has_changed in everyone):
            warn(
                "The checkpoint has the weights that the model was given after strategy.finish(), but not what each"
                " rank needs."
            )
            return None
        if len({num_steps for _, _, num_steps, _ in everyone}) > 1:
            steps = list_some([str(num_steps) for _, _, num_steps, _ in everyone], 8)
            warn(
                f"Ranks have taken different numbers of steps ({steps}): the checkpoint has the global weights, but not"
                " what each rank needs."
            )
            return None
        part = files.rank_part(rounds, identity, self.global_rank, entries)
        file = files.rank_file(common_path, self.global_rank)
        self.checkpoint_io.save_checkpoint(part, file, storage_options=storage_options)
        if self._unfinished is not None:
            self._unfinished.note_kept()
        return files.common_part(rounds, identity, self.world_size)

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; with a module and an optimizer in ``state``, all ranks resume where each was.

        Without an optimizer the module gets the global weights. A module that is not set up yet resumes when it is.
        """
        load = super().load_checkpoint
        remainder = load(path, state, *args, **kwargs)
        if state is not None and state is self._module:
            self._begin(files.Saved())
        if not state or not isinstance(state, dict):
            return remainder
        saved = remainder.pop(KEY, None)
        saved = saved if isinstance(saved, Mapping) else {}
        modules = {name: x for name, x in state.items() if isinstance(x, Module)}
        name = next((name for name, x in modules.items() if x is self._module or name in saved), None)
        if name is None:
            if saved and _has_optimizer(state):
                warn(
                    f"DiLoCo: all ranks get rank 0's optimizers: no module is loaded as {list_some([*saved], 8)}. Give"
                    " fabric.load the module and its optimizers in one state."
                )
            return remainder
        found = files.Saved()
        if _has_optimizer(state):
            rank, place = self.global_rank, files.followed(path)
            found = files.read_saved(
                saved.get(name),
                self._plan,
                rank,
                self.world_size,
                lambda: load(files.rank_file(place, rank), None, *args, **kwargs),
            )
            _restore(found.entries, state, remainder)
        if modules[name] is self._module:
            self._begin(found)
        else:
            self._early = modules[name], found
        return remainder


def _has_optimizer(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())


def _restore(entries: Mapping[str, Any], state: dict[str, Any], remainder: dict[str, Any]) -> None:
    """Replaces what rank 0 had saved, optimizers among it, by what this rank had."""
    for name, value in entries.items():
        if hasattr(state.get(name), "load_state_dict"):
            state[name].load_state_dict(value)
        elif name in state:
            state[name] = value
        elif name in remainder:
            remainder[name] = value
