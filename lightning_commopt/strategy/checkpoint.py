"""The state of the exchanges in Lightning's checkpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.collectives.gather import all_come, gather_on_rank_0
from lightning_commopt.compressors.base import as_real
from lightning_commopt.ddp.hook import BucketHook
from lightning_commopt.ddp.rewrap import ResidualAdder, is_within_batch
from lightning_commopt.ddp.state import (
    KEY,
    CheckpointError,
    CommState,
    adopted,
    from_checkpoint,
    to_checkpoint,
    to_plain,
)
from lightning_commopt.plan import CommPlan
from lightning_commopt.validation import warn

_PATIENCE = timedelta(seconds=60)
_NAMES_IN_MESSAGE = 8


class SavesCommState(DDPStrategy):
    """Mixed into a strategy whose exchanges depend on earlier ones."""

    _plan: CommPlan
    _hook: BucketHook | None = None
    _residual_adder: ResidualAdder | None = None
    _save_comm_state = True
    _num_syncs = 0
    _restored: CommState | None = None
    _of_last_fit: CommState | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Writes a checkpoint, with the state of all ranks' exchanges unless it is of weights only.

        If some ranks do not come, or come in the middle of a batch, because of an exception or a signal, the state is
        left out with a warning.
        """
        if self._save_comm_state and "optimizer_states" in checkpoint:
            saved = self._gathered_state()
            if saved is not None:
                checkpoint[KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; if it is to be trained further, keeps this rank's part of the state."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved = checkpoint.pop(KEY, None)
        module = self.lightning_module
        # After a fit in spawned processes the module of the process that started them belongs to no trainer.
        if module is None or module._trainer is None or module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        self._restored = self._read(saved)
        if isinstance(self.model, DistributedDataParallel):  # in the middle of a fit, as the learning rate finder does
            self._resume_restored()
        return checkpoint

    def _comm_state(self) -> CommState | None:
        """Returns what the exchanges of this fit have left behind, not copied."""
        if self._hook is not None:
            return self._hook.state()
        if self._residual_adder is not None:
            return CommState(None, self._num_syncs, {}, dict(self._residual_adder.residuals))
        return CommState(None, self._num_syncs, is_common=True) if self._num_syncs else None

    def _keep_state_of_fit(self) -> None:
        """Keeps the state beyond the end of a fit, for checkpoints that are saved afterwards."""
        state = self._comm_state()
        if state is not None and self._save_comm_state and not self._is_in_batch():
            self._of_last_fit = state.on_cpu()

    def _is_in_batch(self) -> bool:
        module = self.lightning_module
        return (
            isinstance(self.model, DistributedDataParallel) and module is not None and is_within_batch(module.trainer)
        )

    def _gathered_state(self) -> dict[str, Any] | None:
        state = self._of_last_fit or self._comm_state()
        if state is None or state.is_common or self.world_size == 1:
            parts = [] if state is None or state.is_common else [to_plain(state.on_cpu())]
            return None if state is None else to_checkpoint(state.compressor, state.num_syncs, parts)
        timeout = self._timeout or default_pg_timeout
        position = None if self._is_in_batch() else str(state.num_syncs)
        patience_s, timeout_s = min(_PATIENCE, timeout).total_seconds(), timeout.total_seconds()
        if not dist.is_initialized() or not all_come(position, patience_s, timeout_s):
            warn(
                "A checkpoint is saved without the state of comm_hook: not all ranks have come to save it, between"
                " the same two batches."
            )
            return None
        device = self.root_device if dist.get_backend() == "nccl" else torch.device("cpu")
        ranks = gather_on_rank_0(to_plain(state), device)
        return None if ranks is None else to_checkpoint(state.compressor, state.num_syncs, ranks)

    def _read(self, saved: Any) -> CommState:
        if saved is None:
            return CommState()
        try:
            return from_checkpoint(saved, self.global_rank, self.world_size, self._plan.comm_hook)
        except CheckpointError as error:
            warn(f"The checkpoint's state of comm_hook cannot be used, as {error}; it starts from zero.")
            return CommState()

    def _resume_restored(self) -> None:
        """Goes on with what a checkpoint had, once. All ranks must call it."""
        self._of_last_fit = None
        if self._restored is not None:
            state, self._restored = self._restored, None
            self._resume(state)

    def _resume(self, state: CommState) -> None:
        module = self.lightning_module
        assert module is not None
        buckets, obstacle = {}, None
        try:
            if self._hook is not None:
                buckets = adopted(state, self._hook.compressor, module)
        except CheckpointError as error:
            obstacle = str(error)
        is_exact, self._num_syncs = _agreed(state.num_syncs, obstacle, sorted(buckets))
        if obstacle is not None:
            rank_zero_info(f"Of the checkpoint's state of comm_hook only what is owed is used, as {obstacle}.")
        residuals = state.residuals if is_exact and self._hook is not None else _readable_residuals(state)
        residuals = _of_known_parameters(residuals, module)
        if self._residual_adder is not None:
            self._residual_adder.cancel()
            self._residual_adder = None
        if self._hook is not None:
            self._hook.resume(buckets if is_exact else {}, residuals, self._num_syncs)
        elif residuals:
            self._residual_adder = ResidualAdder(module, residuals)


def _agreed(num_syncs: int, obstacle: str | None, buckets: list[int]) -> tuple[bool, int]:
    """Compares what the ranks have read, as states that do not fit together would make them exchange different things.

    Returns:
        Whether all can use their states, and the number of exchanges.
    """
    mine = (num_syncs, obstacle is None, buckets)
    everyone = [mine]
    if dist.is_initialized():
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    is_exact = obstacle is None and all(each == mine for each in everyone)
    return is_exact, max(number for number, _, _ in everyone)


def _readable_residuals(state: CommState) -> dict[str, Tensor]:
    try:
        return state.all_residuals()
    except CheckpointError as error:
        warn(f"The checkpoint's state of comm_hook cannot be used, as {error}; it starts from zero.")
        return {}


def _of_known_parameters(residuals: dict[str, Tensor], module: Module) -> dict[str, Tensor]:
    shapes = {name: as_real(parameter).shape for name, parameter in module.named_parameters()}
    lost = [name for name, value in residuals.items() if shapes.get(name) != value.shape]
    if lost:
        shown = ", ".join(lost[:_NAMES_IN_MESSAGE]) + (", ..." if len(lost) > _NAMES_IN_MESSAGE else "")
        warn(
            f"What comm_hook owed to {len(lost)} parameters of the checkpoint is dropped, as the model has none of"
            f" that name and shape: {shown}."
        )
    return {name: value for name, value in residuals.items() if name not in lost}
