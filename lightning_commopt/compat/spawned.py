"""Exceptions in the ranks of "ddp_spawn", "ddp_fork" and "ddp_notebook"; see `lightning_commopt.compat`.

Lightning calls no ``on_exception`` in a rank that it has forked or spawned, only in the process that has started the
ranks, whose callbacks have seen nothing of the fit. This module knows the launcher ``_MultiProcessingLauncher``, and
wraps ``_run_stage`` of the Trainer. The names are the same in ``lightning`` and ``pytorch_lightning``; this module
imports neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_commopt.compat.wrapping import wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

_LAUNCHER = "_MultiProcessingLauncher"


def notify_in_spawned_rank(callback: Callback, trainer: Trainer, module: LightningModule) -> None:
    """Calls a callback's ``on_exception`` where Lightning does not: in a rank that it has forked or spawned.

    To be called in ``setup``, which runs in the ranks. Elsewhere this does nothing. The process of such a rank ends
    with the stage, so nothing has to be undone.
    """
    if not any(cls.__name__ == _LAUNCHER for cls in type(trainer.strategy.launcher).__mro__):
        return

    def run_stage(inner: Callable[..., Any]) -> Any:
        try:
            return inner()
        except BaseException as error:
            callback.on_exception(trainer, module, error)
            raise

    wrap_method(trainer, "_run_stage", run_stage)
