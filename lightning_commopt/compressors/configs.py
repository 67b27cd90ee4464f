"""Makes compressors from configurations, and configurations from compressors."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.registry import (
    Entry,
    canonical_name,
    compressor_name,
    compressor_names,
    entry_named,
    entry_of,
    import_path,
    sharded_names,
    shards_entry_named,
    spellings,
)
from lightning_commopt.compressors.shards import FromShards, ShardedCompressor
from lightning_commopt.text.validation import did_you_mean, normalize_name, plain_number

_may_import: ContextVar[bool] = ContextVar("may_import", default=True)


@contextmanager
def without_imports() -> Iterator[None]:
    """Returns a context in which a compressor's name imports no module, for configurations from untrusted sources.

    An import path then names a class only if its module has been imported already.
    """
    token = _may_import.set(False)
    try:
        yield
    finally:
        _may_import.reset(token)


def compressor_from_config(config: str | Mapping[str, Any] | Compressor | None) -> Compressor | None:
    """Builds a compressor from the value of ``comm_hook`` that a user writes.

    Args:
        config: a name; a mapping with ``name`` and that compressor's options (``inner`` of a wrapper is again any
            of these); or a compressor, which is returned as it is. A name is one that `register_compressor` was given,
            whose case and underscores do not matter, or the import path of a class; see `without_imports`.

    Returns:
        The compressor, or None for None and "none".

    Raises:
        ValueError: a name or an option is unknown, or the value of an option is out of range.
        TypeError: ``config`` has another type.
    """
    if config is None or isinstance(config, Compressor):
        return config
    if isinstance(config, type) and issubclass(config, Compressor):
        raise TypeError(f"must be a compressor, not its class: write {config.__name__}() instead of {config.__name__}")
    if callable(config) and not isinstance(config, Mapping):
        name = getattr(config, "__name__", type(config).__name__)
        raise TypeError(f"{name} is a function for DDP, not a compressor: write ddp_comm_hook={name}")
    if isinstance(config, ShardedCompressor):
        return FromShards(shards=config)
    if not isinstance(config, str | Mapping):
        raise TypeError(f"must be a name, a mapping with a name, or a compressor, got {config!r}")
    name, options = split_config(config, compressor_names())
    if name is None:
        return None
    entry = _entry(name)
    return entry.make(**_checked(entry, options, compressor_from_config))


def sharded_from_config(config: object) -> ShardedCompressor | None:
    """Builds a compressor of shards from what a user writes; see `compressor_from_config`.

    Raises:
        ValueError: a name or an option is unknown, a value is out of range, or the compressor needs whole gradients.
        TypeError: ``config`` is not a name, a mapping, a compressor or None.
    """
    if config is None or isinstance(config, ShardedCompressor):
        return config
    if isinstance(config, Compressor):
        return _shards_of(config)
    if not isinstance(config, str | Mapping):
        raise TypeError(f"must be a name, a mapping with a name, or None, got {config!r}")
    name, options = split_config(config, sharded_names())
    if name is None:
        return None
    entry = _shards_entry(name)
    made = entry.cls(**entry.fixed, **_checked(entry, options, sharded_from_config))
    assert isinstance(made, ShardedCompressor)
    return made


def _checked(entry: Entry, options: dict[str, Any], from_config: Callable[[Any], object]) -> dict[str, Any]:
    """Checks that the options of a compressor are valid and complete, and returns them with ``inner`` built."""
    check_options(entry.name, entry.options, options)
    return options | ({"inner": from_config(options["inner"])} if "inner" in options else {})


def _shards_of(compressor: Compressor) -> ShardedCompressor | None:
    """Returns the compressor of shards with the name and the options of a compressor of buckets."""
    if isinstance(compressor, FromShards):
        return compressor.shards
    entry = entry_of(compressor)
    if entry is None or shards_entry_named(entry.name) is None:
        raise ValueError(_needs_whole_gradients(compressor_name(compressor)))
    return sharded_from_config(compressor_to_config(compressor, with_defaults=False))


def split_config(config: str | Mapping[Any, Any], known: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the name in a configuration, None for "none", and the options beside it.

    Raises:
        ValueError: a mapping has no name, or "none" has options; the message lists the ``known`` names.
    """
    options: dict[str, Any] = {"name": config} if isinstance(config, str) else {str(x): y for x, y in config.items()}
    if "name" not in options:
        raise ValueError(f"has no 'name' in {config!r}; known names: {', '.join(known)}")
    name = options.pop("name")
    if name is None or (isinstance(name, str) and normalize_name(name) == "none"):
        if options:
            raise ValueError(f"'none' has no options, got {options!r}")
        return None, {}
    return name, options


def compressor_to_config(compressor: Compressor | ShardedCompressor, *, with_defaults: bool = True) -> dict[str, Any]:
    """Returns the JSON-serializable mapping from which an equal compressor can be made.

    `compressor_from_config` makes it, or `sharded_from_config` for a compressor of shards. ``with_defaults`` includes
    the options that have their default values.

    Raises:
        ValueError: the class is not a dataclass or was defined in a function, or a value cannot be written as JSON.
    """
    averages_buckets = isinstance(compressor, FromShards)
    if isinstance(compressor, FromShards):
        compressor = compressor.shards
    cls = type(compressor)
    if not dataclasses.is_dataclass(compressor):
        raise ValueError(f"{cls.__qualname__} must be a dataclass, because its fields are its options")
    values = {
        field.name: plain_number(getattr(compressor, field.name))
        for field in dataclasses.fields(compressor)
        if field.init and (with_defaults or getattr(compressor, field.name) != field.default)
    }
    entry = entry_of(compressor)
    if averages_buckets and entry is not None and entry_named(entry.name) != entry:
        entry = None  # for buckets, this name stands for another class
    if entry is None and "<locals>" in cls.__qualname__:
        raise ValueError(f"{cls.__qualname__} has no import path: give it a name with @register_compressor")
    entry = entry or Entry(import_path(cls), cls, {})
    options = {key: value for key, value in values.items() if key not in entry.fixed}
    if isinstance(options.get("inner"), Compressor | ShardedCompressor):
        options["inner"] = compressor_to_config(options["inner"], with_defaults=with_defaults)
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"options of {entry.name!r} cannot be written as JSON ({error}): {options!r}") from None
    return {"name": entry.name, **options}


def _entry(name: object) -> Entry:
    if isinstance(name, str) and "." in name:
        return Entry(name, _import_compressor(name), {})
    entry = entry_named(name)
    if entry is None:
        known = compressor_names()
        hint = did_you_mean(name, [*spellings(), *known])
        raise ValueError(f"{name!r} is unknown; known names: {', '.join(known)}{hint}")
    return entry


def _shards_entry(name: object) -> Entry:
    if isinstance(name, str) and "." in name:
        cls = _import_compressor(name)
        if not issubclass(cls, ShardedCompressor):
            raise ValueError(_needs_whole_gradients(name))
        return Entry(name, cls, {})
    entry = shards_entry_named(name)
    if entry is None:
        if (bucket_name := canonical_name(name)) is not None:
            raise ValueError(_needs_whole_gradients(bucket_name))
        known = sharded_names()
        raise ValueError(f"{name!r} is unknown; known names: {', '.join(known)}{did_you_mean(name, known)}")
    return entry


def _needs_whole_gradients(name: str) -> str:
    return (
        f"{name!r} averages whole gradients on every rank, but here each rank receives only its shard: use CommOptDDP,"
        f" or another compressor; known names: {', '.join(sharded_names())}"
    )


def _import_compressor(path: str) -> type[Compressor] | type[ShardedCompressor]:
    module_name, _, class_name = path.rpartition(".")
    if not _may_import.get() and module_name not in sys.modules:
        raise ValueError(
            f"{path!r} is in a module that has not been imported, and a file must not cause imports: import the module"
            " before you load the file"
        )
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be imported ({type(error).__name__}: {error})") from error
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        if issubclass(cls, Compressor):
            return cls
        if issubclass(cls, ShardedCompressor):
            return cls
    raise ValueError(f"{path!r} must be a subclass of Compressor or ShardedCompressor and a dataclass, got {cls!r}")


def check_options(name: str, known: Mapping[str, bool], given: Mapping[str, Any]) -> None:
    """Raises a ValueError if an option is not among the ``known`` (see `options_of`), or a required one is missing."""
    unknown = [option for option in given if option not in known]
    if unknown:
        names, hint = ", ".join(known) or "no options", did_you_mean(unknown[0], known)
        raise ValueError(f"{name!r} has no option {', '.join(map(repr, unknown))}; it has: {names}{hint}")
    missing = [option for option, is_needed in known.items() if is_needed and option not in given]
    if missing:
        raise ValueError(f"{name!r} needs the option {', '.join(map(repr, missing))}")
