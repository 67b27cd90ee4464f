"""Which class a strategy of ours is for the Trainer of which package."""

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
"""For each package with a Trainer, the module of ours that has its strategies."""

BASES = {"CommOptDDP": "DDPStrategy", "CommOptModelParallel": "ModelParallelStrategy"}
"""For each strategy of ours, the one of Lightning that it is derived from."""


def adapter_for(package: str, name: str = "CommOptDDP") -> Any:
    """Returns the class for the Trainer of a package."""
    return getattr(import_module(ADAPTERS[package]), name)


def adapter_in_use(name: str) -> Any:
    """Returns the class for the package that this program imports; see `package_in_use`."""
    return adapter_for(package_in_use(), name)


def move_to_package_of(accelerator: object, strategy: Any) -> None:
    """Makes a strategy of ours that for the Trainer of another package, if the accelerator of such a one is set in it.

    Raises:
        MisconfigurationException: it is of a class that is derived from another package's strategy of ours.
    """
    package, own = package_of(accelerator), package_of(strategy)
    if package == own:
        return
    name = next(cls.__name__ for cls in type(strategy).__mro__ if cls.__name__ in BASES)
    adapter = adapter_for(package, name)
    if type(strategy) is not adapter_for(own, name):
        raise MisconfigurationException(
            f"{type(strategy).__name__} is a strategy for {own}.Trainer. For {package}.Trainer it must be"
            f" derived from {adapter.__module__}.{name}."
        )
    present = {key: vars(strategy)[key] for key in ("_ddp_kwargs",) if key in vars(strategy)}  # of the present plan
    strategy.__class__ = adapter
    getattr(import_module(f"{package}.strategies"), BASES[name]).__init__(strategy, **strategy._lightnings_arguments)
    vars(strategy).update(present)


def _set_accelerator(strategy: Any, accelerator: Any) -> None:
    move_to_package_of(accelerator, strategy)
    strategy._accelerator = accelerator


moving_accelerator: Any = property(
    lambda strategy: strategy._accelerator,
    _set_accelerator,
    doc="The accelerator of the Trainer, which is the first that a Trainer sets.",
)


def accept_everywhere(adapter: type) -> type:
    """Makes the Trainers of all packages accept a strategy; the strategy then becomes that of the Trainer's package."""

    def register(module: ModuleType) -> None:
        getattr(module, BASES[adapter.__name__]).register(adapter)

    for package in ADAPTERS:
        call_after_import(f"{package}.strategies", register)
    return adapter
