"""What every result file says of where it comes from."""

import argparse
import os
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from lightning_commopt.commands.info.info import collect
from lightning_commopt.measure.plain import write_json
from lightning_commopt.measure.runs.record import git_state


def origin_of(load_at_start: float) -> dict[str, Any]:
    """Returns command, date, commit, hardware and versions.

    Args:
        load_at_start: other work on the machine: its load average before the measurement.
    """
    info = collect()
    # Absolute paths are shortened to their names, because a result says nothing of the machine's folders.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    return {
        "command": shlex.join(["python", *words]),
        "date": date.today().isoformat(),
        "git": git_state(Path(__file__).parent),
        "hardware": f"{info['devices'][0]['name']}, {len(os.sched_getaffinity(0))} cores",
        "devices": info["devices"],
        "nccl_version": info["nccl_version"],
        "load_at_start": load_at_start,
        "platform": info["platform"],
        "versions": info["versions"],
    }


def settings_of(arguments: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """Returns what was measured: the options, except those for files, for ranks and those named in ``left_out``."""
    return {key: value for key, value in vars(arguments).items() if key not in ("output", "worker", *left_out)}


def write_result(path: Path, result: dict[str, Any], load_at_start: float) -> None:
    """Stores a result with where it comes from, see `origin_of`; a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, origin_of(load_at_start) | result)


def median_with_interval(values: list[float]) -> dict[str, float]:
    """Returns the median and its bootstrap 95 % interval."""
    draws = np.random.default_rng(0).integers(0, len(values), (10000, len(values)))
    low, high = np.percentile(np.median(np.array(values)[draws], axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "low_95": float(low), "high_95": float(high)}
