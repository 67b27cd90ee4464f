"""The registered compressors, and which of them are recommended."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.configs import compressor_from_config
from lightning_commopt.compressors.registry import EXAMPLE, registered, registered_shards
from lightning_commopt.compressors.shards import ShardedCompressor


def example_compressors() -> dict[str, Compressor]:
    """Returns a compressor for each name, with the default or the example value of each option."""
    examples_by_name = {}
    for name, entry in sorted(registered().items()):
        fields = dataclasses.fields(entry.cls)  # type: ignore[arg-type]
        examples = {field.name: field.metadata[EXAMPLE] for field in fields if EXAMPLE in field.metadata}
        compressor = compressor_from_config({"name": name, **examples})
        assert compressor is not None
        examples_by_name[name] = compressor
    return examples_by_name


def ready_compressors() -> dict[str, Compressor]:
    """Returns the compressors that need no options, with their defaults, except those meant as parts of others."""
    ready = {}
    for name, entry in sorted(registered().items()):
        with suppress(TypeError, ValueError):  # the class is not a dataclass, or its defaults contradict each other
            if not any(entry.options.values()) and not (compressor := entry.make()).claims.is_part:
                ready[name] = compressor
    return ready


def ready_shards() -> dict[str, ShardedCompressor]:
    """Returns the compressors of shards that need no options, with their defaults."""
    ready = {
        name: entry.cls(**entry.fixed) for name, entry in registered_shards().items() if not any(entry.options.values())
    }
    return {name: compressor for name, compressor in ready.items() if isinstance(compressor, ShardedCompressor)}


def recommended() -> list[str]:
    """Returns the names of the recommended compressors, the most exact first."""
    ready = {name: compressor for name, compressor in ready_compressors().items() if compressor.claims.is_recommended}
    return sorted(ready, key=lambda name: ready[name].claims.error_bound or 0.0)
