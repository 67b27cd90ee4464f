"""Checks a run's configuration before anything is started."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from hydra.utils import get_class, get_object, get_original_cwd
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_commopt.compat.lightning import PACKAGES
from lightning_commopt.launch.environment import is_lab_rank, num_started_ranks
from lightning_commopt.launch.lab import NetLab, parse_rate
from lightning_commopt.measure.runs.record import RunRecord, new_record
from lightning_commopt.measure.runs.settings import hydra_settings
from lightning_commopt.plan import CommPlan, DiLoCoPlan
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.strategy.base import is_baseline
from lightning_commopt.strategy.ddp import CommOptStrategy
from lightning_commopt.strategy.diloco import CommOptDiLoCoStrategy
from lightning_commopt.strategy.model_parallel import CommOptModelParallelStrategy
from lightning_commopt.text.validation import check_integer
from lightning_commopt.train.sweep import resolvers
from lightning_commopt.tune.options import AUTO, TuneOptions, plan_from_option

_DEVICES = re.compile(r"\s*(-?\d+|(\d+\s*,\s*)+(\d+\s*)?)\s*")
"""A text that Lightning takes for a number of devices, or for a list of GPUs."""


class ConfigError(CompactHydraException):
    """The user's configuration cannot be run; Hydra prints the message without a traceback."""


class LabShape(NamedTuple):
    """The number of hosts in the network lab, and of ranks on each."""

    num_hosts: int
    ranks_per_host: int


def check_config(config: DictConfig) -> None:
    """Checks that a run's values resolve, except the ``hydra`` node, and checks strategy, link, warm-up and repetition.

    Raises:
        ConfigError: it cannot be run.
    """
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    with _as_config_error():
        _check_repetition(config)
        _check_warmup(config)
    _check_trainer(config)
    _check_devices(config)
    _check_plan(config)
    _check_link(config)


def _check_repetition(config: DictConfig) -> None:
    if (repeat := num_repetitions(config)) > 1:
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            repetitions = ",".join(map(str, range(repeat)))
            raise ConfigError(
                f"repeat={repeat} needs hydra/launcher=fresh_processes; with other launchers repetition={repetitions}"
                " does the same"
            )
        raise ConfigError(f"repeat is for sweeps: add -m, or leave out repeat={repeat}")
    check_integer("repetition", config.repetition, at_least=0)
    check_integer("seed", config.seed, at_least=0)


def _check_warmup(config: DictConfig) -> None:
    """Refuses a run that ends before its first timed step; without ``trainer.max_steps`` the length is unknown."""
    num_warmup_steps = OmegaConf.select(config, "callbacks.speed.num_warmup_steps")
    if num_warmup_steps is None:
        return
    check_integer("num_warmup_steps", num_warmup_steps, at_least=0)
    max_steps = OmegaConf.select(config, "trainer.max_steps")
    if isinstance(max_steps, int) and 0 < max_steps <= num_warmup_steps:
        raise ConfigError(
            f"num_warmup_steps must be from 0 to {max_steps - 1} with trainer.max_steps={max_steps}, as only later"
            f" steps are timed, got {num_warmup_steps}"
        )


def _check_trainer(config: DictConfig) -> None:
    """Refuses arguments of the Trainer that would have no effect, since a run makes them from other values."""
    for option in ("strategy", "callbacks", "logger"):
        if option in config.trainer:
            raise ConfigError(
                f"trainer.{option}={config.trainer[option]} would have no effect: choose from the group {option}, as in"
                f" {option}=..., which commopt-train --help lists"
            )
    if "default_root_dir" in config.trainer:
        raise ConfigError(
            f"trainer.default_root_dir={config.trainer.default_root_dir} would have no effect: set hydra.run.dir, or"
            " hydra.sweep.dir with -m"
        )


def _check_devices(config: DictConfig) -> None:
    devices, num_nodes = config.trainer.devices, config.trainer.num_nodes
    # Of GPUs, -1 are all; numbers of GPUs and "auto" are for Lightning to check.
    if isinstance(devices, int) and devices < 1 and (devices != -1 or config.trainer.accelerator == "cpu"):
        raise ConfigError(f"ranks, or trainer.devices, must be at least 1, got {devices}")
    if isinstance(devices, str) and devices != "auto" and not _DEVICES.fullmatch(devices):
        raise ConfigError(
            f"ranks, or trainer.devices, must be a number, 'auto', or numbers of GPUs such as '0,2', got {devices!r}"
        )
    if isinstance(num_nodes, int) and num_nodes < 1:
        raise ConfigError(f"trainer.num_nodes must be at least 1, got {num_nodes}")
    name = str(config.strategy.get("_target_", "")).rpartition(".")[2]
    if name == "SingleDeviceStrategy":
        for option in ("devices", "num_nodes"):
            if config.trainer[option] not in (1, "1"):
                raise ConfigError(
                    f"strategy=single trains on one device, got trainer.{option}={config.trainer[option]}"
                )
        if not is_lab_rank() and num_started_ranks() > 1:
            raise ConfigError(
                "strategy=single trains in one process, and each of several would train by itself into the same "
                "directory: run it without torchrun and srun, or with one task"
            )
    sharding = {"ModelParallelStrategy": "fsdp", "CommOptModelParallel": "commopt_fsdp"}
    if name in sharding and not _shards_itself(model := str(config.model.get("_target_"))):
        raise ConfigError(
            f"strategy={sharding[name]} needs a model with configure_model, in which it shards itself, got {model}"
        )


def _shards_itself(model: str) -> bool:
    try:
        factory = get_object(model)
    except (ValueError, ImportError):
        return True  # instantiating the model will raise the error
    # A model that does not define it has Lightning's own, which shards nothing.
    configure_model = getattr(factory, "configure_model", None)
    return configure_model is None or not configure_model.__module__.startswith(PACKAGES)


def num_repetitions(config: DictConfig) -> int:
    """Returns how many times a sweep runs a job."""
    with _as_config_error():
        check_integer("repeat", config.repeat, at_least=1)
    return int(config.repeat)


def lab_shape(config: DictConfig) -> LabShape:
    """Returns the hosts of a run with a link, and their ranks; a single rank has one host, whatever ``hosts`` is.

    Raises:
        ConfigError: the ranks cannot be distributed evenly.
    """
    sizes = []
    for name in ("devices", "num_nodes"):
        value = config.trainer[name]
        if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
            raise ConfigError(f"with a link trainer.{name} must be an integer of at least 1, got {value!r}")
        sizes.append(int(value))
    num_ranks = sizes[0] * sizes[1]
    hosts = num_ranks if config.hosts is None else config.hosts
    with _as_config_error("hosts: "):  # the rate has been checked
        NetLab(hosts, config.link)
    hosts = 1 if num_ranks == 1 else hosts
    if num_ranks % hosts:
        raise ConfigError(
            f"hosts must divide the number of ranks, trainer.devices x trainer.num_nodes = {num_ranks}, "
            f"got hosts={hosts}"
        )
    return LabShape(num_hosts=hosts, ranks_per_host=num_ranks // hosts)


def link_note(config: DictConfig) -> str | None:
    """Returns a note on a link that depends on the machine, as in the quickstart: its rate, or why there is none.

    None if the user has set the link, or it is not for CPU ranks that we start.
    """
    if not OmegaConf.is_interpolation(config, "link") or config.trainer.accelerator != "cpu" or is_lab_rank():
        return None
    if config.link is not None:
        shape = lab_shape(config)
        return (
            f"link={config.link}: the ranks run on {shape.num_hosts} hosts of the network lab, on this machine; "
            "link=null turns that off"
        )
    reason = resolvers.why_no_lab()
    return reason and f"no slow link between the ranks: {reason}"


def spread_over_hosts(config: DictConfig) -> DictConfig:
    """Returns a checked configuration for the ranks, a copy with hosts as the Trainer's nodes if there is a link."""
    if config.link is None:
        return config
    shape = lab_shape(config)
    config = copy.deepcopy(config)
    config.trainer.devices = shape.ranks_per_host
    config.trainer.num_nodes = shape.num_hosts
    return config


def sync_method(config: DictConfig) -> str:
    """Returns the name of the comm hook, or the class of another strategy."""
    if _is_a(config, CommOptDiLoCoStrategy) and config.strategy.get("plan") is None:
        return plan_from_option(DiLoCoPlan, None, _options(config)).sync_method
    if not _is_a(config, CommOptStrategy):
        return str(config.strategy.get("_target_", "auto")).rpartition(".")[2]
    comm_hook = config.strategy.get("comm_hook")
    if config.strategy.get("plan") is not None:
        return "auto" if config.strategy.plan == AUTO else "plan"
    return str(comm_hook.get("name") if isinstance(comm_hook, DictConfig) else comm_hook or "none")


def start_record(config: DictConfig, folder: Path) -> RunRecord:
    """Returns a new record for the Hydra job of this process."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    settings = hydra_settings(folder, {str(name): value for name, value in plain.items()})
    return new_record(sync_method(config), Path(get_original_cwd()), settings=settings)


def _check_plan(config: DictConfig) -> None:
    options = _options(config)
    plan, lossy = options.get("plan"), options.get("lossy")
    with _as_config_error("strategy: "):
        if _is_a(config, CommOptDiLoCoStrategy):
            plan_from_option(DiLoCoPlan, plan, options)
        elif _is_a(config, CommOptModelParallelStrategy):
            TuneOptions.of_shards(plan, lossy, options)
            plan_from_option(ShardedPlan, plan, options).check_torch()
        elif _is_a(config, CommOptStrategy):
            TuneOptions.of(plan, lossy, options)
            plan_from_option(CommPlan, plan, options)


def _options(config: DictConfig) -> dict[str, Any]:
    options = OmegaConf.to_container(config.strategy, resolve=True)
    assert isinstance(options, dict)
    return {str(name): value for name, value in options.items()}


def _check_link(config: DictConfig) -> None:
    if config.link is None:
        if config.hosts is not None:
            raise ConfigError(f"hosts={config.hosts} needs a link between them, such as link=1gbit; link is null")
        return
    with _as_config_error("link: "):
        parse_rate(config.link)
    lab_shape(config)
    if config.trainer.accelerator != "cpu":
        raise ConfigError(
            f"link={config.link} is for ranks on CPU: trainer.accelerator must be cpu, got {config.trainer.accelerator}"
        )
    if is_lab_rank():
        return
    started_by = next((name for name in ("LOCAL_RANK", "RANK") if name in os.environ), None)
    if started_by is not None:
        raise ConfigError(
            f"link={config.link} starts the ranks itself: run it without torchrun, in one process ({started_by} is set)"
        )
    reason = resolvers.why_no_lab()
    if reason is not None:
        raise ConfigError(f"link={config.link}: {reason}")


@contextmanager
def _as_config_error(prefix: str = "") -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _is_a(config: DictConfig, base: type) -> bool:
    """Returns whether the strategy is of a class of ours, and not by name or a baseline."""
    target = config.strategy.get("_target_")
    strategy = None if target is None else get_class(target)
    return strategy is not None and issubclass(strategy, base) and not is_baseline(strategy)
