"""Results of benches that nobody has measured, by a formula."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from commopt_diagnose.bench.result import BenchResult, Case, Row
from commopt_diagnose.bench.settings import BenchSettings

SIZES = [2**power for power in range(3, 27)]


def case(size_bytes: int = 1024, **options: Any) -> Case:
    usual = {"operation": "all_reduce", "dtype": "float32", "redop": "sum", "place": "in", "num_ranks": 2}
    return Case(**{"size_bytes": size_bytes, "count": max(1, size_bytes // 4), **usual, **options})


def sample(
    time_s: Callable[[int], float],
    sizes: Sequence[int] = SIZES,
    *,
    noise: float = 0.01,
    num_repetitions: int = 7,
    **options: Any,
) -> list[Row]:
    """Returns a row for each size, with noise that is the same in every call."""
    drawn = random.Random(0)
    return [
        Row(
            case=case(size, **options),
            times_s=[time_s(size) * (1 + noise * drawn.gauss(0, 1)) for _ in range(num_repetitions)],
            num_iters=3,
            num_wrong=0,
        )
        for size in sizes
    ]


def result_of(rows: Sequence[Row], **where: Any) -> BenchResult:
    settings = BenchSettings(sizes_bytes=[row.case.size_bytes for row in rows])
    usual = {
        "world_size": 2,
        "num_nodes": 2,
        "backend": "gloo",
        "versions": {"torch": "2.15.0"},
        "num_cores": 1,
        "devices": ["CPU"],
        "started_at": "2026-11-22T12:00:00+00:00",
        "seconds": 1.0,
        "hosts": ["host"],
        "load_at_start": 0.0,
        "load_at_end": 0.0,
        "link": "1gbit",
        "link_bits_per_s": 10**9,
    }
    return BenchResult(rows=tuple(rows), where={**usual, **where}, settings=settings.to_dict())
