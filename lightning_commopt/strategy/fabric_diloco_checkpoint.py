"""Checkpoints of CommOptDiLoCo in Fabric: the same files as in a Trainer, for the module in ``state``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.text.formatting import list_some
from lightning_commopt.text.validation import warn


class SavesRanksOfFabric(StartsRanks, DDPStrategy):
    """The part of a strategy with `Rounds` in Fabric that saves and resumes them.

    Each rank saves what ``state`` has beside the module in a file of its own: optimizers, schedulers, data loaders.

    Attributes:
        rounds: the exchanges of the module that is trained; None before there is one.
    """

    _plan: DiLoCoPlan
    _saves_comm_state: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds: Rounds | None = None
        self._module: Module | None = None  # the module in training
        self._pending_restore: tuple[Module, files.Saved] | None = None  # a loaded module that is not set up yet
        self._unfinished: Unfinished | None = None  # created by the first step, in the process that trains

    @abstractmethod
    def _begin(self, saved: files.Saved) -> None:
        """Begins rounds from the module's weights, or from a saved state. All ranks must call it."""

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """Returns a module's state; that of the module in training has the global weights and buffers."""
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
        """Writes the file of this rank; returns what all ranks share, or None if ranks cannot resume exactly."""
        rounds = self.rounds
        assert rounds is not None
        assert self._module is not None
        has_changed = rounds.shows_final and not rounds.has_final(self._module)
        gathered = values_of_all_ranks((str(path), uuid4().hex, rounds.num_steps, has_changed))
        # Paths may contain numbers that differ between ranks, so all ranks take rank 0's.
        common_path, identity, *_ = gathered[0]
        if any(has_changed for *_, has_changed in gathered):
            warn(
                "The checkpoint has the weights that the model was given after strategy.finish(), but not the state"
                " that each rank needs to resume exactly."
            )
            return None
        if len({num_steps for _, _, num_steps, _ in gathered}) > 1:
            steps = list_some([str(num_steps) for _, _, num_steps, _ in gathered], 8)
            warn(
                f"Ranks have taken different numbers of steps ({steps}): the checkpoint has the global weights, but not"
                " the state that each rank needs to resume exactly."
            )
            return None
        part = files.rank_part(rounds, identity, self.global_rank, entries)
        file = files.rank_file(common_path, self.global_rank)
        self.checkpoint_io.save_checkpoint(part, file, storage_options=storage_options)
        if self._unfinished is not None:
            self._unfinished.note_kept()
        return files.common_part(rounds, identity, self.world_size)

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; with a module and an optimizer in ``state``, each rank resumes where it was.

        Without an optimizer the module gets the global weights. A module that is not set up yet resumes once it is.
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
                    "DiLoCo: all ranks get rank 0's optimizers, because the state has no module under the name that it"
                    f" was saved with ({list_some([*saved], 8)}). Pass the module and its optimizers to fabric.load in"
                    " one state."
                )
            return remainder
        restored = files.Saved()
        if _has_optimizer(state):
            rank, checkpoint_path = self.global_rank, files.resolve_link(path)
            restored = files.read_saved(
                saved.get(name),
                self._plan,
                rank,
                self.world_size,
                lambda: load(files.rank_file(checkpoint_path, rank), None, *args, **kwargs),
            )
            _restore(restored.entries, state, remainder)
        if modules[name] is self._module:
            self._begin(restored)
        else:
            self._pending_restore = modules[name], restored
        return remainder


def _has_optimizer(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())


def _restore(entries: Mapping[str, Any], state: dict[str, Any], remainder: dict[str, Any]) -> None:
    """Replaces what rank 0 had saved, such as optimizers, by this rank's ``entries``, in ``state`` or ``remainder``."""
    for name, value in entries.items():
        if hasattr(state.get(name), "load_state_dict"):
            state[name].load_state_dict(value)
        elif name in state:
            state[name] = value
        elif name in remainder:
            remainder[name] = value
