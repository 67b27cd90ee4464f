"""Private names of Hydra, and what differs between Hydra 1.3 and 1.4; see `lightning_commopt.compat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra.utils
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

__all__ = [
    "VERSION_BASE",
    "FileConfigSource",  # a folder of configs; our subclass adds a hint to the error for an unknown option
    "allow_targets",
    "get_args_parser",  # needed to separate overrides from flags on a command line
    "packages_of_targets",
    "register_resolver",
    "store_config",
]

_HAS_WHITELIST = hasattr(hydra.utils, "execution_whitelist")  # true for Hydra 1.4 and later

VERSION_BASE: Mapping[str, str] = {} if _HAS_WHITELIST else {"version_base": "1.3"}
"""A keyword of ``hydra.main`` and ``initialize``: 1.3 warns without it, 1.4 with it."""


def allow_targets(packages: Sequence[str]) -> AbstractContextManager[object]:
    """Allows ``instantiate`` and Hydra's logging objects of more packages; Hydra before 1.4 allows all."""
    if not _HAS_WHITELIST:
        return nullcontext()
    allowing: Any = hydra.utils.execution_whitelist  # type: ignore[attr-defined]
    context: AbstractContextManager[object] = allowing([f"{package}.*" for package in packages])
    return context


def packages_of_targets(config: object) -> list[str]:
    """Returns the packages of all ``_target_`` in a resolved configuration, except Python's standard library.

    >>> packages_of_targets({"a": {"_target_": "torch.optim.SGD", "b": [{"_target_": "os.system"}]}})
    ['torch']
    """
    packages = (target.partition(".")[0] for target in _targets(config) if isinstance(target, str))
    return sorted(set(packages) - sys.stdlib_module_names)


def _targets(config: object) -> Iterator[object]:
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield config["_target_"]
        config = list(config.values())
    if isinstance(config, list):
        for value in config:
            yield from _targets(value)


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Registers a resolver with OmegaConf, or replaces the one with that name."""
    register = getattr(OmegaConf, "register_resolver" if _HAS_WHITELIST else "register_new_resolver")
    register(name, resolver, replace=True)


def store_config(*, group: str, name: str, node: object) -> None:
    """Stores a config in Hydra, or replaces the one with that name."""
    replace: dict[str, Any] = {"replace": True} if _HAS_WHITELIST else {}
    ConfigStore.instance().store(group=group, name=name, node=node, **replace)
