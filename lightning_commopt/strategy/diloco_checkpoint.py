"""Checkpoints of CommOptDiLoCo: global weights in the checkpoint, and beside it a file that each rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lightning_commopt.compat.loops import batch_is_open
from lightning_commopt.diloco_plan import DiLoCoPlan
from lightning_commopt.measure.observer import Observers
from lightning_commopt.strategy.base import WithTimeout, is_fit
from lightning_commopt.sync.checkpoint import KEY
from lightning_commopt.sync.diloco import checkpoint as files
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.strategies import trainer_of
from lightning_commopt.text.validation import warn

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object


class SavesRanks(WithTimeout, _DDPStrategy):
    """The part of a strategy with `Rounds` that saves and resumes them; see `lightning_commopt.sync.diloco.checkpoint`.

    Attributes:
        rounds: the exchanges of the fit; None outside of one.
    """

    rounds: Rounds | None
    _plan: DiLoCoPlan
    _saves_comm_state: bool
    _saved = files.Saved()

    @property
    def sync_observers(self) -> Observers:
        """Observers that are notified of exchanges."""
        raise NotImplementedError

    def _begin_rounds(self, exchange: Exchange) -> None:
        assert self.lightning_module is not None
        saved, self._saved = self._saved, files.Saved()
        self.rounds = Rounds(self._plan, self.lightning_module, exchange, saved.trained, self.sync_observers)
        saved.restore(self.rounds)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state with global weights and buffers in place of this rank's."""
        if self.rounds is None:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return files.global_state_dict(self.lightning_module, self.rounds)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self.rounds is not None and self._saves_comm_state and "optimizer_states" in checkpoint:
            if batch_is_open(trainer_of(self)):  # perhaps only this rank saves one, after an exception
                warn("A checkpoint within a training batch has the global weights, but not what each rank needs.")
            else:
                self._save_ranks(self.rounds, checkpoint, filepath, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _save_ranks(
        self, rounds: Rounds, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None
    ) -> None:
        rounds.wait()
        # Names of files may have a rank's own numbers in them.
        filepath, identity = self.broadcast((filepath, uuid4().hex))
        names = ("optimizer_states", "lr_schedulers", type(self.precision_plugin).__qualname__)
        entries = {name: checkpoint[name] for name in names if name in checkpoint}
        part = files.rank_part(rounds, identity, self.global_rank, entries)
        self.checkpoint_io.save_checkpoint(
            part, files.rank_file(filepath, self.global_rank), storage_options=storage_options
        )
        checkpoint[KEY] = files.common_part(rounds, identity, self.world_size)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self._saves_comm_state and self.local_rank == 0:  # nodes may have disks of their own
            with suppress(FileNotFoundError):
                self.checkpoint_io.remove_checkpoint(files.ranks_folder(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint
        checkpoint = load(checkpoint_path, *args, **kwargs)
        saved = checkpoint.pop(KEY, None)
        if is_fit(self):
            rank, path = self.global_rank, files.followed(checkpoint_path)
            self._saved = files.read_saved(
                saved, self._plan, rank, self.world_size, lambda: load(files.rank_file(path, rank), *args, **kwargs)
            )
            checkpoint.update(self._saved.entries)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self.rounds is not None:  # the learning rate finder loads a checkpoint in the middle of a fit
            self.rounds.wait()
            self.rounds.close()
            self._begin_rounds(self.rounds.exchange)
