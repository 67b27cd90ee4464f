"""What a training program under ``commopt tune`` does differently: its Trainers get ``CommOptDDP(plan="auto")``."""

from __future__ import annotations

import inspect
import json
import os
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_commopt.commands.tune.run import VARIABLE
from lightning_commopt.compat.import_hook import call_after_import

_MODULES = {
    "lightning.pytorch.trainer.trainer": "lightning_commopt.lightning",
    "pytorch_lightning.trainer.trainer": "lightning_commopt.pytorch_lightning",
}


def install() -> None:
    """Makes the Trainers of this process tune; imports neither torch nor Lightning."""
    if VARIABLE in os.environ:
        for module in _MODULES:
            call_after_import(module, _change_trainer)


def _change_trainer(module: ModuleType) -> None:
    init = module.Trainer.__init__

    @wraps(init)
    def tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs)
        given.apply_defaults()
        ours = import_module(_MODULES[module.__name__]).CommOptDDP
        given.arguments["strategy"] = _tuned_strategy(given.arguments["strategy"], ours)
        init(*given.args, **given.kwargs)

    module.Trainer.__init__ = tuned


def _tuned_strategy(strategy: Any, ours: Any) -> Any:
    """Returns what takes the place of a Trainer's strategy.

    Raises:
        ValueError: it is none of DDP's, or has a comm hook.
    """
    from lightning_commopt.compat.lightning import arguments_of_ddp, comm_hook_of, is_lightnings_ddp
    from lightning_commopt.strategy.aliases import aliases
    from lightning_commopt.strategy.ddp import CommOptStrategy

    if isinstance(strategy, str):
        name = strategy.removeprefix("commopt_")
        known = aliases().get(f"commopt_{name}")
        if strategy != "auto" and known is None:
            raise ValueError(f"commopt tune is for DDP, and the Trainer has strategy={strategy!r}")
        strategy = ours(**(known or {}))
    elif is_lightnings_ddp(strategy):
        if comm_hook_of(strategy) is not None:
            raise ValueError("commopt tune has nothing to choose: the Trainer's DDPStrategy has a ddp_comm_hook")
        strategy = ours(**arguments_of_ddp(strategy))
    elif not isinstance(strategy, CommOptStrategy):
        raise ValueError(f"commopt tune is for DDP, and the Trainer has strategy={strategy!r}")
    _tune(strategy)
    return strategy


def _tune(strategy: Any) -> None:
    """Makes a strategy of ours look for a plan, whatever that costs, and write it to the file."""
    from lightning_commopt.commands.tune.tuning import Tuning

    strategy.auto_plan = Tuning(strategy, json.loads(os.environ[VARIABLE]))
