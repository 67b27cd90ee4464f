"""Which class `CommOptDDP` is for the Trainer of which package."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_commopt.compat.import_hook import call_after_import
from lightning_commopt.compat.lightning import package_in_use

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


def accept_everywhere(adapter: type) -> type:
    """Makes the Trainers of all packages accept a strategy; the strategy then becomes that of the Trainer's package."""

    def register(module: ModuleType) -> None:
        module.DDPStrategy.register(adapter)

    for package in ADAPTERS:
        call_after_import(f"{package}.strategies", register)
    return adapter
