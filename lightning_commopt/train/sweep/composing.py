"""Composes the jobs of a sweep from their overrides: checked configurations and commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_commopt.launch.hydra_command import quote
from lightning_commopt.measure.runs.files import CONFIG_FILE, EARLIER_FOLDER, RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import flat
from lightning_commopt.train.sweep.config import (
    ConfigError,
    check_config,
    link_note,
    num_repetitions,
    spread_over_hosts,
    sync_method,
)
from lightning_commopt.train.sweep.job import Job

# These affect training only through trainer.devices and trainer.num_nodes.
_NOT_TRAINED = ("ranks", "hosts")


@dataclass(frozen=True, kw_only=True)
class JobComposer:
    """Makes the jobs of one sweep, with the context and configuration that Hydra passes to the launcher."""

    command: tuple[str, ...]  # the command that starts one run, without overrides
    context: HydraContext
    sweep_config: DictConfig

    def rounds(self, job_overrides: Sequence[Sequence[str]], first_number: int) -> list[list[Job]]:
        """Composes and checks the jobs of one call of the sweeper: all of them for each repetition, in the given order.

        Raises:
            ConfigError: a job cannot be run, or has another ``repeat`` than the others.
        """
        configs = [self._compose(list(own)) for own in job_overrides]
        repeat = _repeat(configs)
        numbers = count(first_number * repeat)
        return [
            [
                self._job(list(own), config, next(numbers), repetition)
                for own, config in zip(job_overrides, configs, strict=True)
            ]
            for repetition in (range(repeat) if repeat > 1 else [None])
        ]

    def _compose(self, overrides: list[str]) -> DictConfig:
        return self.context.config_loader.load_sweep_config(self.sweep_config, overrides)

    def _job(self, overrides: list[str], config: DictConfig, number: int, repetition: int | None) -> Job:
        further = []
        if repetition is not None:
            others = (o for o in overrides if not o.startswith(("repeat=", "repetition=")))
            overrides = [*others, f"repetition={repetition}"]
            config = self._compose(overrides)
            if config.repeat != 1:  # a configuration file sets it, not an override
                config.repeat, further = 1, ["repeat=1"]
        run_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        with _as_job(config, number, folder=None) as folder:
            check_config(run_config)
            name, note = sync_method(run_config), link_note(run_config)
            config_yaml = OmegaConf.to_yaml(spread_over_hosts(run_config), resolve=True)
        # Number and folder are made equal for all jobs, as they do not affect training.
        with _as_job(config, 0, folder=Path("/")):
            content = _content(run_config)
        as_single_run = [
            *(o for o in self.sweep_config.hydra.overrides.hydra if not o.startswith("hydra.mode=")),
            *overrides,
            *further,
            "hydra.mode=RUN",
            f"hydra.run.dir={quote(str(folder))}",
            f"hydra.job.num={number}",
            f"hydra.job.id={quote(str(number))}",
        ]
        return Job(
            number=number,
            sync_method=name,
            overrides=tuple(overrides),
            command=(*self.command, *as_single_run),
            folder=folder,
            config_yaml=config_yaml,
            content=content,
            note=note,
        )


def check_folders(jobs: Iterable[Job]) -> None:
    """Checks that jobs do not write over each other.

    Raises:
        ConfigError: two of them have the same folder.
    """
    first_of_folder: dict[Path, Job] = {}
    for job in jobs:
        other = first_of_folder.setdefault(job.folder, job)
        if other is not job:
            raise ConfigError(
                f"hydra.sweep.subdir must differ between jobs, but jobs {other.number} and {job.number} have the same "
                f"directory {job.folder}: use ${{hydra.job.num}} in it"
            )


def _repeat(configs: Sequence[DictConfig]) -> int:
    counts = {num_repetitions(config) for config in configs}
    if len(counts) > 1:
        raise ConfigError(f"repeat is for the whole sweep: it must be the same in all jobs, got {sorted(counts)}")
    repeat = max(counts, default=1)
    set_by_user = [config.repetition for config in configs if config.repetition != 0]
    if repeat > 1 and set_by_user:
        raise ConfigError(f"repeat={repeat} sets repetition: leave out one of them, got repetition={set_by_user[0]}")
    return repeat


def _content(run_config: DictConfig) -> str:
    values = OmegaConf.to_container(spread_over_hosts(run_config), resolve=True)
    assert isinstance(values, dict)
    return json.dumps({name: value for name, value in values.items() if name not in _NOT_TRAINED}, default=str)


@contextmanager
def _as_job(config: DictConfig, number: int, folder: Path | None) -> Iterator[Path]:
    """Resolves ``${hydra:...}`` in a job's configuration as in the job itself, and yields the job's folder.

    The ``hydra`` node is completed; ``folder`` replaces the configured one.
    """
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = str(number)
        config.hydra.job.num = number
        if folder is None:
            folder = (Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir).resolve()
        config.hydra.runtime.output_dir = str(folder)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield folder
    finally:
        HydraConfig.instance().cfg = before


_SWEEP_DIR = "hydra.sweep.dir="
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)  # such a path needs no quotes in a shell or in Hydra


def find_finished_run(job: Job) -> RunRecord | None:
    """Returns the record of a finished run of the same configuration in a job's folder; None without one."""
    try:
        record = RunRecord.load(job.folder)
    except (FileNotFoundError, ValueError):
        return None
    is_known = record.status == "finished" and (job.folder / CONFIG_FILE).exists()
    return record if is_known and not find_changed_keys(job) else None


def find_changed_keys(job: Job) -> list[str]:
    """Returns the dotted keys in which the configuration of the run in a job's folder differs; empty without a run."""
    path = job.folder / CONFIG_FILE
    try:
        before = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        return []
    except (YAMLError, OmegaConfBaseException, OSError, ValueError):
        before = None
    if not isinstance(before, dict):  # the file was cut off, or is another program's
        return [CONFIG_FILE]
    before = flat(before)  # type: ignore[arg-type]
    current = flat(OmegaConf.to_container(OmegaConf.create(job.config_yaml)))  # type: ignore[arg-type]
    in_both = before.keys() & current.keys()
    return [name for name in {**current, **before} if name not in in_both or before[name] != current[name]]


def set_aside(folder: Path, sweep_dir: Path) -> Path | None:
    """Moves an earlier run out of a job's folder, so that files of two runs do not mix and none is lost.

    Returns its new folder; None if there was none, or the job's folder is outside of the sweep's.
    """
    if not (folder / RUN_FILE).exists() or sweep_dir not in folder.parents:
        return None
    name = folder.relative_to(sweep_dir)
    attempt = 1
    while (target := sweep_dir / EARLIER_FOLDER / f"{name}.{attempt}").exists():
        attempt += 1
    target.parent.mkdir(parents=True, exist_ok=True)
    return folder.rename(target)


def continue_command(arguments: Sequence[str], sweep_dir: Path) -> str:
    """Returns the shell command that continues a sweep, from the arguments that started it."""
    current_folder = Path.cwd()
    shown = sweep_dir.relative_to(current_folder) if sweep_dir.is_relative_to(current_folder) else sweep_dir
    others = [argument for argument in arguments if not argument.startswith(_SWEEP_DIR)]
    value = shown if _PLAIN_PATH.fullmatch(str(shown)) else quote(str(shown))
    return shlex.join(["commopt-train", *others, f"{_SWEEP_DIR}{value}"])
