"""Which class `CommOptDDP` is for the Trainer of which package."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_commopt.compat.import_hook import call_after_import
from lightning_commopt.compat.lightning import MisconfigurationException, package_in_use, package_of

ADAPTERS = {
    "lightning.pytorch": "lightning_commopt.lightning",
    "pytorch_lightning": "lightning_commopt.pytorch_lightning",
}
"""For each package with a Trainer, the module of ours that has its `CommOptDDP`."""


def adapter_for(package: str) -> Any:
    """Returns the class for the Trainer of a package."""
    return import_module(ADAPTERS[package]).CommOptDDP


def adapter_in_use() -> Any:
    """Returns the class for the package that this program imports; see `package_in_use`."""
    return adapter_for(package_in_use())


def move_to_package_of(accelerator: object, strategy: Any) -> None:
    """Makes a strategy of ours that for the Trainer of another package, if a Trainer of that one takes it.

    Args:
        accelerator: of the Trainer.
        strategy: of a class that `ADAPTERS` has, or derived from one.

    Raises:
        MisconfigurationException: it is of a class that is derived from another package's `CommOptDDP`.
    """
    package, own = package_of(accelerator), package_of(strategy)
    if package == own:
        return
    adapter = adapter_for(package)
    if type(strategy) is not adapter_for(own):
        raise MisconfigurationException(
            f"{type(strategy).__name__} is a strategy for {own}.Trainer. For {package}.Trainer it must be"
            f" derived from {adapter.__module__}.CommOptDDP."
        )
    ddp_kwargs = strategy._ddp_kwargs
    strategy.__class__ = adapter
    import_module(f"{package}.strategies").DDPStrategy.__init__(strategy, **strategy._lightnings_arguments)
    strategy._ddp_kwargs = ddp_kwargs  # of the present plan


def accept_everywhere(adapter: type) -> type:
    """Makes the Trainers of all packages accept a strategy; the strategy then becomes that of the Trainer's package."""

    def register(module: ModuleType) -> None:
        module.DDPStrategy.register(adapter)

    for package in ADAPTERS:
        call_after_import(f"{package}.strategies", register)
    return adapter
