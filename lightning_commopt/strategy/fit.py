"""What the strategy for a Trainer does around a fit: it checks for SIGTERM, and keeps state in checkpoints."""

from __future__ import annotations

from typing import Any

from torch.distributed.constants import default_pg_timeout

from lightning_commopt.compat.lightning import has_trainer, optimizer_is_toggled
from lightning_commopt.compat.loops import batch_is_open
from lightning_commopt.compat.sigterm import SigtermCheck, broadcasts_sigterm
from lightning_commopt.sync.checkpoint import gather_state, read_state
from lightning_commopt.sync.state import KEY
from lightning_commopt.text.validation import warn_once


def check_sigterm(strategy: Any, every_n_steps: int | None) -> SigtermCheck | None:
    """Replaces Lightning's check for SIGTERM in a fit of several ranks; None where nothing is to be replaced."""
    if every_n_steps is None or strategy.world_size == 1 or not is_fit(strategy):
        return None
    trainer = strategy.lightning_module.trainer
    if not broadcasts_sigterm(trainer):
        warn_once(
            f"sigterm_every_n_steps={every_n_steps} has no effect: this version of Lightning does not broadcast SIGTERM"
            " between batches; those from 2.5.2 on do."
        )
        return None
    return SigtermCheck(trainer, every_n_steps)


def is_in_batch(strategy: Any) -> bool:
    """Returns whether a training batch has begun and not ended."""
    if strategy.gradient_sync.model is None:
        return False
    return batch_is_open(strategy.lightning_module.trainer)


def must_rewrap(strategy: Any) -> bool:
    """Returns whether parameters were frozen or unfrozen for good since DDP laid out its buckets."""
    module, trainable = strategy.lightning_module, strategy.gradient_sync.trainable
    if trainable is None or module is None or optimizer_is_toggled(module):
        return False
    return trainable.some_unfrozen() or (trainable.some_frozen() and not strategy.plan.find_unused_parameters)


def add_comm_state(checkpoint: dict[str, Any], strategy: Any) -> None:
    """Adds the gradient-sync state of all ranks to a checkpoint, on the rank that writes it; see `gather_state`."""
    saved = gather_state(
        strategy.gradient_sync.state(),
        is_in_batch=is_in_batch(strategy),
        world_size=strategy.world_size,
        timeout=strategy._timeout or default_pg_timeout,
        device=strategy.root_device,
    )
    if saved is not None:
        checkpoint[KEY] = strategy.auto_plan.add_choice(saved)


def take_comm_state(checkpoint: dict[str, Any], strategy: Any) -> None:
    """Takes the gradient-sync state out of a checkpoint; if a fit goes on from it, this rank's part is used."""
    saved = checkpoint.pop(KEY, None)
    if not is_fit(strategy):
        return
    sync, module = strategy.gradient_sync, strategy.lightning_module
    strategy.auto_plan.resume_choice(saved)
    sync.restore(read_state(saved, strategy.global_rank, strategy.world_size, strategy.plan.comm_hook))
    if sync.model is not None:  # in the middle of a fit, as the learning rate finder does
        sync.resume(module)


def is_fit(strategy: Any) -> bool:
    """Returns whether the Trainer that a strategy belongs to is in a fit."""
    module = strategy.lightning_module
    # After a fit in spawned processes the module of the process that started them belongs to no trainer.
    return module is not None and has_trainer(module) and module.trainer.state.fn == "fit"
