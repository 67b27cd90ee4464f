"""A compressor in few words, for tables and figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.registry import compressor_name, fixed_options

_WORDS = {
    "start_step": "start",
    "block_size": "block",
    "refresh_steps": "refresh",
    "min_compression_rate": "min rate",
    "min_numel": "from numel",
}


def short_name(compressor: Compressor) -> str:
    """Returns the name that configurations use, and what differs from the defaults.

    ``matrix_rank`` is always there, as runs are compared by it. What a wrapper wraps stands in parentheses.

    >>> from lightning_commopt.compressors import Hierarchical, Int8, PowerSGD
    >>> short_name(PowerSGD(matrix_rank=4, start_step=500, error_feedback=False))
    'powersgd rank 4, start 500, no error feedback'
    >>> short_name(Hierarchical(inner=Int8(block_size=64)))
    'hierarchical (int8 block 64)'
    """
    words = [f"rank {compressor.matrix_rank}"] if hasattr(compressor, "matrix_rank") else []
    inner = ""
    fields: tuple[dataclasses.Field[Any], ...] = ()
    if dataclasses.is_dataclass(compressor):
        fields = dataclasses.fields(compressor)
    for field in fields:
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            inner = f" ({short_name(value)})"
        elif value != field.default and field.name not in ("matrix_rank", *fixed_options(compressor)):
            words.append(say_option(field.name, value))
    return f"{compressor_name(compressor)}{inner}{' ' if words else ''}{', '.join(words)}"


def say_option(name: str, value: Any) -> str:
    """Returns an option and its value in words.

    >>> say_option("error_feedback", False), say_option("start_step", 5), say_option("residual_dtype", "bfloat16")
    ('no error feedback', 'start 5', 'residual dtype bfloat16')
    """
    words = _WORDS.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {f'{value:g}' if isinstance(value, float) else value}"
