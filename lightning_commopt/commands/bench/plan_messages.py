"""The messages of a plan, for `--plan`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_commopt.compressors import compressor_from_config, compressor_to_config
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
    if run_dir is None:
        cap = plan.bucket_cap_mb
        caps = _DDP_DEFAULT_MIB if cap is None else cap if isinstance(cap, Sequence) else (cap,)
        sizes_bytes = sorted({max(1, round(cap * _MIB)) for cap in caps})
    else:
        layouts = read_run(run_dir)[0].layouts
        sizes_bytes = sorted({bucket.gradient_bytes for bucket in layouts[-1].values()} if layouts else ())
        if not sizes_bytes:
            raise ValueError(
                f"{run_dir}: the steps in it have no buckets: DDP had one rank, or another strategy trained"
            )
    if plan.comm_hook is None:
        return sizes_bytes, []
    config = compressor_to_config(plan.comm_hook)
    with suppress(ValueError, TypeError):  # the name alone needs options
        if compressor_from_config(config["name"]) == plan.comm_hook:
            return sizes_bytes, [config["name"]]
    return sizes_bytes, [config]
