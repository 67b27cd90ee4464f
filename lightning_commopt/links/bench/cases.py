"""The cases that settings ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_commopt.links.bench.result import Case
from lightning_commopt.links.bench.settings import BenchSettings

_ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
}
_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all", "reduce_scatter_all_gather")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "reduce_broadcast", "reduce_scatter_all_gather")
_OUT_ONLY = ("all_to_all", "send_recv")


def cases_of(settings: BenchSettings, num_ranks: Mapping[str, int]) -> list[Case]:
    """Returns the cases, each once, the small messages first.

    Args:
        settings: what to measure.
        num_ranks: in a group of each scope.
    """
    found: dict[Case | tuple[object, ...], Case] = {}
    for size_bytes in settings.sizes_bytes:
        for case in _cases_of_size(settings, size_bytes, num_ranks):
            found.setdefault((*case.series, case.size_bytes), case)
    return list(found.values())


def _cases_of_size(settings: BenchSettings, size_bytes: int, num_ranks: Mapping[str, int]) -> Iterator[Case]:
    for scope in settings.scopes:
        for dtype in settings.dtypes:
            for load in settings.loads:
                shared: dict[str, Any] = {"dtype": dtype, "load": load, "scope": scope, "num_ranks": num_ranks[scope]}
                for operation in settings.collectives:
                    parts = num_ranks[scope] if operation in _DIVIDED else 1
                    count = max(1, size_bytes // _ITEM_BYTES[dtype] // parts)
                    size: dict[str, Any] = {"count": count, "size_bytes": count * _ITEM_BYTES[dtype] * parts}
                    for redop in settings.redops if operation in _REDUCING else ("none",):
                        for place in ("out",) if operation in _OUT_ONLY else settings.places:
                            yield Case(operation=operation, redop=redop, place=place, **size, **shared)
                for comm_hook in settings.comm_hooks if dtype.startswith(("float", "bfloat")) else ():
                    count = max(1, size_bytes // _ITEM_BYTES[dtype])
                    yield Case(
                        operation="comm_hook",
                        comm_hook=comm_hook,
                        size_bytes=count * _ITEM_BYTES[dtype],
                        count=count,
                        redop="mean",
                        place="in",
                        **shared,
                    )
