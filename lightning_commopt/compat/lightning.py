"""Private names of Lightning; see `lightning_commopt.compat`.

Of ``DDPStrategy`` our strategies override ``_configure_launcher``, ``_register_ddp_hooks`` and ``_setup_distributed``
(Fabric), and read or set ``_ddp_kwargs``, ``_timeout``, ``_start_method``, ``_launcher``, ``_backward_sync_control``
(Fabric) and ``_pl_static_graph_delay_done``: they are what the class is made of, and have no public form. Our launcher
overrides ``_call_children_scripts`` and calls ``_check_can_spawn_children``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import _StrategyRegistry as StrategyRegistry
from lightning.fabric.strategies.ddp import _DDPBackwardSyncControl as DDPBackwardSyncControl
from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
from lightning.pytorch.overrides.distributed import _sync_module_states as sync_module_states
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _augment_message as augment_message

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "DDPBackwardSyncControl",  # Fabric asks it for the context of no_backward_sync
    "StrategyRegistry",  # for annotations only
    "SubprocessScriptLauncher",  # starts the other ranks; ours starts them with another command line
    "augment_message",  # adds to the message of an exception, as Lightning does to DDP's
    "batches_that_stepped",
    "comm_hook_of",
    "has_trainer",
    "is_validation_next",
    "optimizer_is_toggled",
    "renew_rank",
    "sync_module_states",  # DDP's own way to send parameters, for baselines
    "will_accumulate",
    "wrap_comm_hook",
]


def batches_that_stepped(trainer: Trainer) -> int:
    """Returns the step number that Lightning gives to loggers: ``global_step`` counts each of several optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def will_accumulate(trainer: Trainer) -> bool:
    """Returns whether the batch that is under way takes no optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_validation_next(trainer: Trainer) -> bool:
    """Returns whether a validation comes before the next batch; for ``on_train_batch_end``."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def optimizer_is_toggled(module: LightningModule) -> bool:
    """Returns whether ``toggle_optimizer`` has frozen the parameters of other optimizers just now."""
    return bool(module._param_requires_grad_state)


def has_trainer(module: LightningModule) -> bool:
    """Returns whether a module belongs to a trainer; its public ``trainer`` raises where it does not."""
    return module._trainer is not None


def renew_rank() -> None:
    """Has messages that are for rank 0 follow the environment as it is now: Lightning reads it once, when imported."""
    rank_zero_only.rank = _get_rank() or 0  # type: ignore[attr-defined]


def comm_hook_of(strategy: object) -> Callable[..., Any] | None:
    """Returns the ``ddp_comm_hook`` of Lightning's ``DDPStrategy``; None for other strategies, or if it has none."""
    return getattr(strategy, "_ddp_comm_hook", None)


def wrap_comm_hook(strategy: Any, wrap: Callable[[Any], Any]) -> None:
    """Puts a wrapper around the hook that Lightning's ``DDPStrategy`` will register; does nothing to others.

    Args:
        strategy: before it wraps the model.
        wrap: takes the hook, wrapped as the strategy would have it.
    """
    if hasattr(strategy, "_ddp_comm_wrapper"):
        inner = strategy._ddp_comm_wrapper
        strategy._ddp_comm_wrapper = wrap if inner is None else lambda hook: wrap(inner(hook))
