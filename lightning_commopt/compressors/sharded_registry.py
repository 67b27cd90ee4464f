"""Compressors of sharded gradients by name, and as what a configuration has of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.registry import canonical_name, check_options, options_of, split_config
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.text.validation import did_you_mean, normalize_name

SHARDED: Mapping[str, type[ShardedCompressor]] = {"bf16": ShardedBf16, "int8": ShardedInt8, "int4": ShardedInt4}
"""Those that need no options, by the name that configurations use."""
_BY_NAME: Mapping[str, type[ShardedCompressor]] = {**SHARDED, "hierarchical": ShardedHierarchical}


def sharded_from_config(config: Any) -> ShardedCompressor | None:
    """Builds a compressor from what a user writes.

    That is a name; a mapping with ``name`` and that compressor's options, of which ``inner`` is again any of these; a
    `ShardedCompressor`; None or "none".

    Raises:
        ValueError: unknown name or option, a compressor that needs whole gradients, or a value is out of range.
        TypeError: ``config`` is none of these.
    """
    if config is None or isinstance(config, ShardedCompressor):
        return config
    if isinstance(config, Compressor):
        raise TypeError(f"{type(config).__name__} is a compressor for DDP: give a name, such as 'int8', or a mapping")
    if not isinstance(config, str | Mapping):
        raise TypeError(f"must be a name, a mapping with a name, or None, got {config!r}")
    known = ["none", *_BY_NAME]
    written, options = split_config(config, known)
    if written is None:
        return None
    name = normalize_name(written) if isinstance(written, str) else ""
    if name not in _BY_NAME:
        known_names = f"known names: {', '.join(known)}"
        if (ddps := canonical_name(written)) is not None:
            raise ValueError(
                f"{ddps!r} averages whole gradients on every rank, but here each rank receives its shard only: use"
                f" CommOptDDP, or another compressor; {known_names}"
            )
        raise ValueError(f"{written!r} is unknown; {known_names}{did_you_mean(written, _BY_NAME)}")
    check_options(name, options_of(_BY_NAME[name]), options)
    if "inner" in options:
        options["inner"] = sharded_from_config(options["inner"])
    return _BY_NAME[name](**options)


def sharded_to_config(compressor: ShardedCompressor) -> dict[str, Any]:
    """Returns the mapping that `sharded_from_config` makes an equal compressor from.

    Of a user's own class it is a description, by which an equal compressor can be recognized.
    """
    cls = type(compressor)
    name = next((name for name, known in _BY_NAME.items() if known is cls), None)
    if name is None:
        return {"name": f"{cls.__module__}.{cls.__qualname__}", "described": repr(compressor)}
    options = {field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)}  # type: ignore[arg-type]
    if isinstance(compressor, ShardedHierarchical):
        options["inner"] = sharded_to_config(compressor.inner)
    return {"name": name, **options}


def sharded_name(compressor: ShardedCompressor) -> str:
    """Returns the name that configurations use, with that of its inner one; of a user's own that of its class."""
    if isinstance(compressor, ShardedHierarchical):
        return f"hierarchical {sharded_name(compressor.inner)}"
    names = (name for name, cls in SHARDED.items() if type(compressor) is cls)
    return next(names, type(compressor).__name__)
