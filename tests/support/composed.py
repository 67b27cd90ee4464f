"""The configuration of ``commopt-train``, composed in this process."""

import copy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from rich.console import Console

from lightning_commopt.compat.hydra import VERSION_BASE
from lightning_commopt.launch.conf_path import conf_dir
from lightning_commopt.train.sweep.display import SweepDisplay
from lightning_commopt.train.sweep.launcher import register_with_hydra


def composed(*overrides: str, output_dir: Path | None = None) -> DictConfig:
    """Returns a run's configuration, and makes this process the job that has it, with ``output_dir``."""
    register_with_hydra((), SweepDisplay(Console(quiet=True)))
    config = copy.deepcopy(_composed(str(conf_dir()), overrides))
    with open_dict(config):
        config.hydra.runtime.output_dir = str(output_dir or "somewhere")
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


@cache  # a composition takes as long as three fits, and tests ask for the same ones
def _composed(folder: str, overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(folder, **VERSION_BASE):
        return compose("train", [*overrides], return_hydra_config=True)
