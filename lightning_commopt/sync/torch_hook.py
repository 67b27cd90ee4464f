"""Torch's comm hooks, and a user's own, with the arguments of Lightning's strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.measure.observer import Observers
from lightning_commopt.sync.checks import warn_of_torchs_powersgd
from lightning_commopt.sync.observed import ObservedHook
from lightning_commopt.text.validation import warn


class TorchHook(NamedTuple):
    """The three ``ddp_comm_*`` arguments of ``DDPStrategy``."""

    hook: Callable[..., Any]
    state: object | None = None
    wrapper: Callable[..., Any] | None = None

    def attach(self, model: DistributedDataParallel, observers: Observers) -> None:
        """Registers the hook with a new wrapper. If torch refuses that on CPU it warns, and DDP all-reduces."""
        hook = self.hook if self.wrapper is None else self.wrapper(self.hook)
        if observers:
            hook = ObservedHook(hook, model, observers).reduce
        try:
            model.register_comm_hook(state=self.state, hook=hook)
        except TypeError as error:
            if model.device_type == "cuda":
                raise
            warn(f"ddp_comm_hook has no effect on {model.device_type}: torch refuses it ({error}).")
            return
        if model.device_type != "cuda":
            warn_of_torchs_powersgd(self.hook)
