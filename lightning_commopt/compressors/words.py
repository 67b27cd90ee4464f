"""Short descriptions of compressors for tables and figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.registry import compressor_name, entry_of
from lightning_commopt.compressors.shards import FromShards, ShardedCompressor

_OPTION_WORDS = {
    "start_step": "start",
    "block_size": "block",
    "refresh_steps": "refresh",
    "min_compression_rate": "min rate",
    "min_numel": "from numel",
}


def short_name(compressor: Compressor | ShardedCompressor) -> str:
    """Returns the name that configurations use, and the options that differ from their defaults.

    ``matrix_rank`` is always included, since runs are compared by it. A wrapped compressor is in parentheses.

    >>> from lightning_commopt.compressors import Hierarchical, Int8, PowerSGD
    >>> short_name(PowerSGD(matrix_rank=4, start_step=500, error_feedback=False))
    'powersgd rank 4, start 500, no error feedback'
    >>> short_name(Hierarchical(inner=Int8(block_size=64)))
    'hierarchical (int8 block 64)'
    """
    if isinstance(compressor, FromShards):
        compressor = compressor.shards
    words = [f"rank {compressor.matrix_rank}"] if hasattr(compressor, "matrix_rank") else []
    inner, entry = "", entry_of(compressor)
    implied = {"matrix_rank", *(entry.fixed if entry else ())}
    fields: tuple[dataclasses.Field[Any], ...] = ()
    if dataclasses.is_dataclass(compressor):
        fields = dataclasses.fields(compressor)
    for field in fields:
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor | ShardedCompressor):
            inner = f" ({short_name(value)})"
        elif value != field.default and field.name not in implied:
            words.append(option_in_words(field.name, value))
    return f"{compressor_name(compressor)}{inner}{' ' if words else ''}{', '.join(words)}"


def option_in_words(name: str, value: object) -> str:
    """Returns an option and its value in words.

    >>> option_in_words("error_feedback", False), option_in_words("start_step", 5)
    ('no error feedback', 'start 5')
    """
    words = _OPTION_WORDS.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {f'{value:g}' if isinstance(value, float) else value}"
