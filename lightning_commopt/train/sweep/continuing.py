"""What an earlier sweep has left in the directories of jobs, and how to continue one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from lightning_commopt.launch.hydra_command import quote
from lightning_commopt.measure.runs.files import CONFIG_FILE, EARLIER_FOLDER, RUN_FILE
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.train.sweep.job import Job

_SWEEP_DIR = "hydra.sweep.dir="
_PLAIN_PATH = re.compile(r"[\w./-]+", re.ASCII)  # without quotes the same to a shell and to Hydra


def find_finished_run(job: Job) -> RunRecord | None:
    """Returns the record of a finished run in a job's folder that is the one the job would make; None without."""
    try:
        record = RunRecord.load(job.folder)
    except (FileNotFoundError, ValueError):
        return None
    is_known = record.status == "finished" and (job.folder / CONFIG_FILE).exists()
    return record if is_known and not find_changed_keys(job) else None


def find_changed_keys(job: Job) -> list[str]:
    """Returns where the configuration of the run in a job's folder differs from the job's, in dotted keys.

    Empty if they are the same, or there is no run.
    """
    path = job.folder / CONFIG_FILE
    try:
        before = _flat(OmegaConf.to_container(OmegaConf.load(path)))
    except FileNotFoundError:
        return []
    except (YAMLError, OSError):
        return [CONFIG_FILE]
    now = _flat(OmegaConf.to_container(OmegaConf.create(job.config_yaml)))
    in_both = before.keys() & now.keys()
    return [name for name in {**now, **before} if name not in in_both or before[name] != now[name]]


def set_aside(folder: Path, sweep_dir: Path) -> Path | None:
    """Moves a run out of a job's folder, so that files of two runs do not mix there and none is lost.

    Args:
        folder: of the job.
        sweep_dir: of its sweep.

    Returns:
        Where the run is now; None if there was none, or the folder is not one within the sweep's.
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
    """Returns the line for a shell that continues a sweep.

    Args:
        arguments: with which it was started, without the program's name.
        sweep_dir: its directory.
    """
    here = Path.cwd()
    shown = sweep_dir.relative_to(here) if sweep_dir.is_relative_to(here) else sweep_dir
    others = [argument for argument in arguments if not argument.startswith(_SWEEP_DIR)]
    value = shown if _PLAIN_PATH.fullmatch(str(shown)) else quote(str(shown))
    return shlex.join(["commopt-train", *others, f"{_SWEEP_DIR}{value}"])


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by their dotted keys; an empty mapping is a leaf."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in _flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }
