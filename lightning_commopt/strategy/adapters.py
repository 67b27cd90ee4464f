"""The classes of our strategies for the Trainers of both packages, and their names in Lightning's registries.

Importing this module imports neither torch nor Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any, Protocol

from lightning_commopt.compat.import_hook import call_after_import
from lightning_commopt.compat.lightning import MisconfigurationException, package_in_use, package_of

ADAPTERS = {
    "lightning.pytorch": "lightning_commopt.lightning",
    "pytorch_lightning": "lightning_commopt.pytorch_lightning",
}
"""For each package with a Trainer, the module with our strategies for it."""

BASES = {
    "CommOptDDP": "DDPStrategy",
    "CommOptDiLoCo": "DDPStrategy",
    "CommOptModelParallel": "ModelParallelStrategy",
}
"""For each strategy of ours, the name of Lightning's strategy that it is derived from."""


def adapter_for(package: str, name: str = "CommOptDDP") -> Any:
    """Returns the class of a strategy for the Trainer of a package."""
    return getattr(import_module(ADAPTERS[package]), name)


def adapter_in_use(name: str) -> Any:
    """Returns the class of a strategy for the package that this program imports; see `package_in_use`."""
    return adapter_for(package_in_use(), name)


class _TrainerStrategy(Protocol):
    """A strategy of ours for a Trainer. It keeps the arguments for the constructor of Lightning's class."""

    _lightning_arguments: dict[str, Any]
    _accelerator: object


def move_to_package_of(accelerator: object, strategy: _TrainerStrategy) -> None:
    """Changes the class of one of our strategies to that for the package of its Trainer's accelerator.

    A strategy may be created before it is known whether ``lightning.pytorch`` or ``pytorch_lightning`` provides the
    Trainer.

    Raises:
        MisconfigurationException: the strategy is a subclass of the user's, derived from the other package's class.
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
    # `apply_plan` changes these after construction, but not the constructor's arguments.
    ddp_kwargs = {key: vars(strategy)[key] for key in ("_ddp_kwargs",) if key in vars(strategy)}
    strategy.__class__ = adapter
    getattr(import_module(f"{package}.strategies"), BASES[name]).__init__(strategy, **strategy._lightning_arguments)
    vars(strategy).update(ddp_kwargs)


def _set_accelerator(strategy: _TrainerStrategy, accelerator: object) -> None:
    move_to_package_of(accelerator, strategy)
    strategy._accelerator = accelerator


accelerator_property: Any = property(
    lambda strategy: strategy._accelerator,
    _set_accelerator,
    doc="The Trainer's accelerator. Trainers set it first, so the setter makes the strategy's class fit the Trainer.",
)


def accept_in_both_packages(adapter: type) -> type:
    """Class decorator: Trainers of both packages accept the strategy, and `move_to_package_of` then fits its class.

    It registers the strategy as a virtual subclass of the strategies of both packages when these are imported.
    """

    def register(module: ModuleType) -> None:
        getattr(module, BASES[adapter.__name__]).register(adapter)

    for package in ADAPTERS:
        call_after_import(f"{package}.strategies", register)
    return adapter


REGISTRIES: Mapping[str, tuple[str, str]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_commopt.lightning"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "lightning_commopt.pytorch_lightning"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_commopt.fabric"),
}
"""For each module with a registry of strategies: the registry's name in it, and the module with our strategies."""

# The suffixes are those of Lightning's names for its DDP strategies, such as "ddp_spawn".
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_UNUSED_PARAMETERS = {"": None, "_find_unused_parameters_false": False, "_find_unused_parameters_true": True}


def aliases() -> dict[str, dict[str, Any]]:
    """Returns registered names of `CommOptDDP`, each with its arguments; the compressors are `ready_compressors`.

    >>> aliases()["commopt_ddp_bf16_spawn_find_unused_parameters_true"]
    {'comm_hook': 'bf16', 'start_method': 'spawn', 'find_unused_parameters': True}
    """
    # This import is not at the top because it imports torch. A program that uses a registry has imported torch already.
    from lightning_commopt.compressors.catalog import ready_compressors

    return {
        f"commopt_ddp{f'_{comm_hook}' if comm_hook else ''}{start}{unused}": {
            "comm_hook": comm_hook,
            "start_method": start_method,
            "find_unused_parameters": find_unused,
        }
        for comm_hook, (start, start_method), (unused, find_unused) in product(
            (None, *ready_compressors()), _START_METHODS.items(), _UNUSED_PARAMETERS.items()
        )
    }


def register_with(module: ModuleType) -> None:
    """Registers all names with the registry of a module that `REGISTRIES` lists; names that it has already are kept."""
    registry_name, our_module = REGISTRIES[module.__name__]

    # This import is not at the top because it imports torch; see `aliases`.
    from lightning_commopt.compressors.catalog import ready_compressors, ready_shards

    entries: list[tuple[str, str, dict[str, Any]]] = [
        (name, "CommOptDDP", options) for name, options in aliases().items()
    ]
    others: list[tuple[str, str, Iterable[str]]] = [("commopt_diloco", "CommOptDiLoCo", ready_compressors())]
    if our_module != "lightning_commopt.fabric":
        # Fabric's CommOptModelParallel has a required argument, parallelize_fn, so a name alone cannot create it.
        others.append(("commopt_model_parallel", "CommOptModelParallel", ready_shards()))
    for alias, cls, hooks in others:
        entries += [(f"{alias}{f'_{hook}' if hook else ''}", cls, {"comm_hook": hook}) for hook in (None, *hooks)]
    registry = getattr(module, registry_name)
    for name, cls, arguments in entries:
        if name not in registry:
            shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if value is not None)
            create = partial(_create_strategy, our_module, cls)
            registry.register(name, create, description=f"{cls}({shown})", **arguments)


def _create_strategy(module: str, name: str, **arguments: Any) -> Any:
    """Creates a strategy when a Trainer asks for one, since the import of its module imports torch and Lightning."""
    return getattr(import_module(module), name)(**arguments)
