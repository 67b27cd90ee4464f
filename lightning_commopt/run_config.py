"""What a run's configuration says, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hydra.errors import CompactHydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_commopt.plan import CommPlan, OptionError, plan_options
from lightning_commopt.strategy import CommOptDDP


class ConfigError(CompactHydraException):
    """The user's configuration cannot be run; Hydra prints the message without a traceback."""


def register_resolvers() -> None:
    """Makes ``${commopt.accelerator:}``, ``${commopt.device:}`` and ``${commopt.devices:n}`` known to OmegaConf."""
    has_gpu = torch.cuda.is_available()
    resolvers: dict[str, Callable[..., Any]] = {
        "commopt.accelerator": lambda: "gpu" if has_gpu else "cpu",
        "commopt.device": lambda: "cuda:0" if has_gpu else "cpu",
        "commopt.devices": lambda num_cpu_processes: torch.cuda.device_count() if has_gpu else num_cpu_processes,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def check_config(config: DictConfig) -> None:
    """Checks the part of a run's configuration that says how gradients travel, and that all values resolve.

    Args:
        config: of one run, without the ``hydra`` node.

    Raises:
        ConfigError: it cannot be run; the message says why.
    """
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    if config.strategy.get("_target_", "").endswith(".SingleDeviceStrategy") and config.trainer.devices not in (1, "1"):
        raise ConfigError(f"strategy=single trains on one device, got trainer.devices={config.trainer.devices}")
    if not _is_commopt(config):
        return
    options = OmegaConf.to_container(config.strategy, resolve=True)
    assert isinstance(options, dict)
    try:
        CommPlan.from_dict({str(name): value for name, value in options.items() if name in plan_options()})
    except OptionError as error:
        raise ConfigError(f"strategy: {error}") from error


def plan_name(config: DictConfig) -> str:
    """Returns a short name for the way the gradients travel: the comm hook's, or the class of another strategy."""
    if not _is_commopt(config):
        return str(config.strategy.get("_target_", "auto")).rpartition(".")[2]
    comm_hook = config.strategy.get("comm_hook")
    return str(comm_hook.get("name") if isinstance(comm_hook, DictConfig) else comm_hook or "none")


def _is_commopt(config: DictConfig) -> bool:
    target = config.strategy.get("_target_")
    return target is not None and issubclass(get_class(target), CommOptDDP)
