"""The registered compressors, and what to recommend beside each of them: asked of their classes."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from lightning_commopt.compressors.base import Compressor, Layout
from lightning_commopt.compressors.registry import EXAMPLE, compressor_from_config, registered

_LAST_RESORT = 1.0
"""Error bound from which on a compressor is recommended only where gradient sync takes much longer than backward."""


def example_compressors() -> dict[str, Compressor]:
    """Returns one compressor for each name: with its defaults, and the examples of fields that have none."""
    found = {}
    for name, entry in sorted(registered().items()):
        fields = dataclasses.fields(entry.cls)  # type: ignore[arg-type]
        examples = {field.name: field.metadata[EXAMPLE] for field in fields if EXAMPLE in field.metadata}
        compressor = compressor_from_config({"name": name, **examples})
        assert compressor is not None
        found[name] = compressor
    return found


def ready_compressors() -> dict[str, Compressor]:
    """Returns those with their defaults that are used as they are: neither parts, nor around another one."""
    ready = {}
    for name, entry in sorted(registered().items()):
        with suppress(TypeError, ValueError):  # no dataclass, or its defaults do not go together
            if not any(entry.options.values()):
                ready[name] = entry.cls(**entry.fixed)
    return {name: compressor for name, compressor in ready.items() if not compressor.claims.is_part}


def recommended() -> list[str]:
    """Returns the names of the compressors that are recommended at all, the one that sends most first."""
    return [step.name for step in _ladder()]


def recommendations(current: Compressor | None, *, is_lossy: bool) -> dict[str, Any]:
    """Returns what to try instead of a compressor, in types that JSON has.

    Args:
        current: what averages gradients now; None where that is not one of ours.
        is_lossy: whether it changes them.

    Returns:
        ``alternatives``: ``name``, ``error_bound``, ``share`` of the bytes that travel now and ``is_last_resort`` of
        what sends less, most bytes first. ``milder``: the one that sends most, if that is more than now; else "".
        ``cheaper_with``: see `Claims`.
    """
    ladder = _ladder()
    share = 1.0 if not is_lossy else None if current is None else _share(current)
    error_bound = 0.0 if not is_lossy or current is None else current.claims.error_bound or 0.0
    less = [step for step in ladder if step.error_bound > error_bound and step.share < (share or 1.0)]
    if is_lossy:  # one step at a time; where its share is unknown, only what is far below any other
        last = [step for step in less if step.error_bound >= _LAST_RESORT]
        less = last if share is None else [*[step for step in less if step not in last][:1], *last]
    return {
        "alternatives": [
            {
                "name": step.name,
                "share": step.share / (share or 1.0),
                "error_bound": step.error_bound,
                "is_last_resort": step.error_bound >= _LAST_RESORT,
            }
            for step in less
        ],
        "milder": ladder[0].name if ladder and (share is None or ladder[0].share > share) else "",
        "cheaper_with": "" if current is None else current.claims.cheaper_with,
    }


class _Recommended(NamedTuple):
    name: str
    share: float
    error_bound: float


def _ladder() -> list[_Recommended]:
    ready = {name: compressor for name, compressor in ready_compressors().items() if compressor.claims.is_recommended}
    steps = [_Recommended(name, _share(x) or 1.0, x.claims.error_bound or 0.0) for name, x in ready.items()]
    return sorted(steps, key=lambda step: -step.share)


def _share(compressor: Compressor) -> float | None:
    """Returns the bytes that travel over those of the gradients, in a large matrix; None if only training knows."""
    layout = _large_layout()
    try:
        return compressor.wire_bytes(layout, 2) / (layout.numel * layout.dtype.itemsize)
    except Exception:  # such as nodes that only training knows; what a user's class raises must not end a fit either
        return None


@cache
def _large_layout() -> Layout:
    return Layout.of([torch.empty(4096, 4096, device="meta")], torch.float32)
