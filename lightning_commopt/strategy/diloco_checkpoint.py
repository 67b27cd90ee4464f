"""Checkpoints of CommOptDiLoCo: the checkpoint has the global weights, and each rank writes a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from lightning_commopt.compat.loops import batch_is_open
from lightning_commopt.measure.observer import Observers
from lightning_commopt.measure.recorder import issued_by
from lightning_commopt.strategy.base import is_fit, own_exception
from lightning_commopt.strategy.living_collectives import LivingCollectives
from lightning_commopt.sync.checkpoint import KEY, all_ranks_save, open_checkpoint, to_checkpoint, to_plain
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.diloco import checkpoint as files
from lightning_commopt.sync.diloco.equalize import tensors_of
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.diloco.state_dict import global_state_dict
from lightning_commopt.sync.gather import map_tensors
from lightning_commopt.sync.state import AnyState, CheckpointError, CommState
from lightning_commopt.sync.strategies import trainer_of
from lightning_commopt.text.validation import warn
from lightning_commopt.watch.times import STALLED_S


class SavesRanks(LivingCollectives):
    """The part of a strategy with `Rounds` that saves and resumes them; see `sync.diloco.checkpoint`."""

    _inner: GradientSync
    _saves_comm_state: bool
    _saved = files.Saved()
    _rounds_of_ended_fit: Rounds | None = None
    _has_ended_normally = False  # whether the last fit has ended without an exception

    @property
    def sync_observers(self) -> Observers:
        """Observers that are notified of exchanges, and of DDP's buckets within a node."""
        return self._inner.observers

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle without the rounds of an ended fit, which cannot be pickled and may be large."""
        return {**super().__getstate__(), "_rounds_of_ended_fit": None}

    def _begin_rounds(self, exchange: Exchange) -> None:
        assert self.lightning_module is not None
        self._rounds_of_ended_fit, self._has_ended_normally = None, False
        saved, self._saved = self._saved, files.Saved()
        self.rounds = Rounds(self._plan, self.lightning_module, exchange, saved.trained, self.sync_observers)
        saved.restore(self.rounds)

    def _begin_again(self, rounds: Rounds) -> None:
        rounds.wait()
        rounds.close()
        self._begin_rounds(rounds.exchange)

    def _adopt_weights_of_hooks(self) -> None:
        """Starts from weights that hooks have set before the first batch, rather than exchange them as training."""
        rounds, module = self.rounds, self.lightning_module
        assert rounds is not None
        assert module is not None
        if rounds.num_steps or rounds.counts.samples:
            return
        with issued_by("exchange"):
            if rounds.differs_from(rounds.fragments):
                self._equalize(tensors_of(module))
                self._begin_again(rounds)

    def _keep_rounds_for_checkpoints(self, rounds: Rounds) -> None:
        """Keeps the rounds of a fit that has ended for checkpoints that are saved after it."""
        self._has_ended_normally = rounds.shows_final
        if self._saves_comm_state and rounds.shows_final:
            rounds.to_host()
            self._inner.keep_state()
            self._rounds_of_ended_fit = rounds

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state with global weights and buffers in place of this rank's."""
        if self.rounds is None:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return global_state_dict(self.lightning_module, self.rounds)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        rounds = self.rounds or self._rounds_of_ended_fit
        if rounds is not None and self._saves_comm_state and "optimizer_states" in checkpoint:
            if (reason := self._reason_not_to_save_ranks(rounds)) is None:
                self._save_rank_file(rounds, checkpoint, filepath, storage_options)
            else:
                warn(f"A checkpoint {reason}, but not the state that each rank needs to resume exactly.")
        ongoing = self.rounds
        is_averaged = (
            self._has_ended_normally if ongoing is None else ongoing.shows_final and ongoing.set_at_end is not None
        )
        if is_averaged and "current_model_state" in checkpoint:
            # WeightAveraging still has this worker's average, and the model has the mean of all workers.
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _reason_not_to_save_ranks(self, rounds: Rounds) -> str | None:
        """Returns why the ranks cannot save what each needs to resume, or None if they can.

        The text continues "A checkpoint ...". All ranks that save get the same result.
        """
        is_open = batch_is_open(trainer_of(self))
        if self.world_size > 1 and own_exception(self) is not None:
            # Perhaps this rank alone saves a checkpoint, and would wait for the others for ever.
            position = None if is_open else str(rounds.num_steps)
            saves_alone = self._living is not None or self._guards.fails_alone
            if saves_alone or not all_ranks_save(position, self, patience_s=STALLED_S):
                return "after an exception has the global weights"
        if is_open:
            return "within a training batch has the global weights"
        assert self.lightning_module is not None
        if self.rounds is None and self.reduce_boolean_decision(not rounds.has_final(self.lightning_module), all=False):
            return "has the weights that the model was given after the fit"
        return None

    def _save_rank_file(
        self, rounds: Rounds, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None
    ) -> None:
        rounds.wait()
        if not rounds.is_exact:
            rank_0_note = (
                " before it, because rank 0 has missed it, too" if rounds.is_behind and self.is_global_zero else ""
            )
            warn(
                "A rank has missed an exchange of DiLoCo: the checkpoint has the global weights"
                f"{rank_0_note}, but not the state that each rank needs to resume exactly."
            )
            return
        # Paths may contain numbers that differ between ranks, so all ranks take rank 0's.
        filepath, identity = self.broadcast((filepath, uuid4().hex))
        names = ["optimizer_states", "lr_schedulers", "callbacks", type(self.precision_plugin).__qualname__]
        if "current_model_state" in checkpoint:
            # WeightAveraging has put this rank's average into "state_dict", in place of the model.
            names.append("state_dict")
        entries = {name: checkpoint[name] for name in names if name in checkpoint}
        if (state := self._inner.state()) is not None:
            entries[KEY] = _to_plain(state)
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
            rank, path = self.global_rank, files.resolve_link(checkpoint_path)
            self._saved = files.read_saved(
                saved, self._plan, rank, self.world_size, lambda: load(files.rank_file(path, rank), *args, **kwargs)
            )
            entries = dict(self._saved.entries)
            if KEY in entries:
                self._inner.restore(self._from_plain(entries.pop(KEY)))
            checkpoint.update(entries)
        return checkpoint

    def _from_plain(self, saved: Any) -> AnyState:
        try:
            return open_checkpoint(saved).of_rank(0, 1, self._inner.plan.comm_hook)
        except CheckpointError as error:
            return CommState(damage=str(error))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self.rounds is not None:  # the learning rate finder loads a checkpoint in the middle of a fit
            self._begin_again(self.rounds)
            assert self.lightning_module is not None
            self._inner.resume(self.lightning_module)


def _to_plain(state: AnyState) -> dict[str, Any]:
    """Returns the gradient sync within a node for this rank's file, in the format of a checkpoint of a single rank."""
    ranks = [] if state.is_common else [map_tensors(Tensor.cpu, to_plain(state))]
    return to_checkpoint(state.compressor, state.num_syncs, ranks)
