"""Expands `BenchSettings` into the cases that a bench measures, and finds the messages of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from commopt_diagnose.bench.result import Case
from commopt_diagnose.bench.settings import BenchSettings
from lightning_commopt.compressors import compressor_to_config
from lightning_commopt.measure.files import read_run
from lightning_commopt.plan import CommPlan
from lightning_commopt.text.validation import check_integer

# Collectives in which each rank holds a part of the message; that reduce; and that only work out of place.
_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all", "reduce_scatter_all_gather")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "reduce_broadcast", "reduce_scatter_all_gather")
_OUT_ONLY = ("all_to_all", "send_recv")
_MIB = 2**20  # DDP's bucket_cap_mb counts in MiB
_DDP_DEFAULT_MIB = (1, 25)
"""Default size of DDP's first bucket, and of all others."""


def num_ranks_of_scopes(settings: BenchSettings, world_size: int, ranks_per_node: int) -> dict[str, int]:
    """Returns how many ranks a group of each scope has.

    Raises:
        ValueError: there is only one rank, a scope does not fit the nodes, or the root is out of range.
    """
    check_integer("the number of ranks", world_size, at_least=2)
    num_ranks = {"all": world_size}
    if has_nodes(world_size, ranks_per_node):
        num_ranks |= {"node": ranks_per_node, "across": world_size // ranks_per_node}
    for scope in settings.scopes:
        if scope not in num_ranks:
            raise ValueError(
                f"scope {scope!r} needs several nodes with several ranks each, equally many;"
                f" there are {world_size} ranks, {ranks_per_node} on each node"
            )
        if settings.root >= num_ranks[scope]:
            raise ValueError(f"root must be below the number of ranks, {num_ranks[scope]}, got {settings.root}")
    return num_ranks


def has_nodes(world_size: int, ranks_per_node: int) -> bool:
    """Returns whether there are several nodes with several ranks each, equally many."""
    return 1 < ranks_per_node < world_size and world_size % ranks_per_node == 0


def cases_of(settings: BenchSettings, num_ranks: Mapping[str, int]) -> list[Case]:
    """Returns the cases, each once, small messages first; ``num_ranks`` is by scope."""
    cases: dict[tuple[object, ...], Case] = {}
    for size_bytes in settings.sizes_bytes:
        for case in _cases_of_size(settings, size_bytes, num_ranks):
            cases.setdefault((*case.series, case.size_bytes), case)
    return list(cases.values())


def _cases_of_size(settings: BenchSettings, size_bytes: int, num_ranks: Mapping[str, int]) -> Iterator[Case]:
    for scope in settings.scopes:
        for dtype in settings.dtypes:
            item_bytes = getattr(torch, dtype).itemsize
            for load in settings.loads:
                shared: dict[str, Any] = {"dtype": dtype, "load": load, "scope": scope, "num_ranks": num_ranks[scope]}
                for operation in settings.collectives:
                    parts = num_ranks[scope] if operation in _DIVIDED else 1
                    count = max(1, size_bytes // item_bytes // parts)
                    size: dict[str, Any] = {"count": count, "size_bytes": count * item_bytes * parts}
                    for redop in settings.redops if operation in _REDUCING else ("none",):
                        for place in ("out",) if operation in _OUT_ONLY else settings.places:
                            yield Case(operation=operation, redop=redop, place=place, **size, **shared)
                for comm_hook in settings.comm_hooks if dtype.startswith(("float", "bfloat")) else ():
                    count = max(1, size_bytes // item_bytes)
                    yield Case(
                        operation="comm_hook",
                        comm_hook=comm_hook,
                        size_bytes=count * item_bytes,
                        count=count,
                        redop="mean",
                        place="in",
                        **shared,
                    )


def messages_of(plan: CommPlan, run_dir: Path | None = None) -> tuple[list[int], list[Any]]:
    """Returns the sizes of a plan's buckets, each once, and its comm hook as in configurations, if it has one.

    The sizes are the plan's caps; with ``run_dir`` they are the sizes of the buckets in that run.

    Raises:
        FileNotFoundError: the run has no records of steps.
        ValueError: its records have no buckets.
    """
    if run_dir is None:
        cap = plan.bucket_cap_mb
        caps = _DDP_DEFAULT_MIB if cap is None else cap if isinstance(cap, Sequence) else (cap,)
        sizes_bytes = sorted({max(1, round(cap * _MIB)) for cap in caps})
    else:
        steps = read_run(run_dir)[0].steps
        sizes_bytes = sorted({bucket.gradient_bytes for bucket in steps[-1].layout.values()} if steps else ())
        if not sizes_bytes:
            raise ValueError(
                f"{run_dir}: the steps in it have no buckets: DDP had one rank, or another strategy trained"
            )
    if plan.comm_hook is None:
        return sizes_bytes, []
    config = compressor_to_config(plan.comm_hook, with_defaults=False)
    return sizes_bytes, [config if len(config) > 1 else config["name"]]
