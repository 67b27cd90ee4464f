"""The messages of a plan, for `--plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_commopt.compressors import Compressor, compressor_from_config, compressor_to_config
from lightning_commopt.measure.files import read_run
from lightning_commopt.plan import CommPlan

_MIB = 2**20
_DDP_DEFAULT_MIB = (1, 25)
"""DDP's first bucket, and all others."""


def messages_of(plan: CommPlan, run_dir: Path | None = None) -> tuple[list[int], list[Any]]:
    """Returns the sizes of a plan's buckets, each once, and its comm hook as in configurations, if it has one.

    Buckets have the size of the plan's caps, or those of a run with it.

    Raises:
        FileNotFoundError: the run has no records of steps.
        ValueError: its records have no buckets.
    """
    sizes_bytes = _sizes_of_caps(plan.bucket_cap_mb) if run_dir is None else _sizes_of_run(run_dir)
    if plan.comm_hook is None:
        return sizes_bytes, []
    config = compressor_to_config(plan.comm_hook)
    name = config["name"]
    return sizes_bytes, [name if _compressor_of(name) == plan.comm_hook else config]


def _compressor_of(name: str) -> Compressor | None:
    """Returns the compressor of a name without options; None if it needs options."""
    try:
        return compressor_from_config(name)
    except (ValueError, TypeError):
        return None


def _sizes_of_caps(cap_mib: float | Sequence[float] | None) -> list[int]:
    caps = _DDP_DEFAULT_MIB if cap_mib is None else cap_mib if isinstance(cap_mib, Sequence) else (cap_mib,)
    return sorted({max(1, round(cap * _MIB)) for cap in caps})


def _sizes_of_run(run_dir: Path) -> list[int]:
    first, *_ = read_run(run_dir)
    layout = first.layouts[-1] if first.layouts else {}
    sizes = sorted({bucket.gradient_bytes for bucket in layout.values()})
    if not sizes:
        raise ValueError(f"{run_dir}: the steps in it have no buckets: DDP had one rank, or another strategy trained")
    return sizes
