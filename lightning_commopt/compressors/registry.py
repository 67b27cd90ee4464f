"""Names of compressors in configurations. Each class registers itself.

A name may have a class for DDP's buckets, one for FSDP2's shards, or both. A class for shards also works with buckets,
as `FromShards`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.compressors.shards import FromShards, ShardedCompressor
from lightning_commopt.text.validation import normalize_name


class Entry(NamedTuple):
    """A name, its class, and the options that the name implies."""

    name: str
    cls: type[Compressor] | type[ShardedCompressor]
    fixed: Mapping[str, Any]

    def make(self, **options: Any) -> Compressor:
        """Returns the compressor of buckets with these options."""
        made = self.cls(**self.fixed, **options)
        return FromShards(shards=made) if isinstance(made, ShardedCompressor) else made

    @property
    def options(self) -> dict[str, bool]:
        """The names of the options, and whether each is required."""
        return {name: is_needed for name, is_needed in options_of(self.cls).items() if name not in self.fixed}


def options_of(cls: type) -> dict[str, bool]:
    """Returns the names of the options of a dataclass, and whether each is required."""
    return {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(cls)
        if field.init
    }


EXAMPLE = "example"
"""Key in the metadata of a field without a default, for a value with which the compressor can be tried."""

# The keys of both are normalized names and aliases.
_BUCKET_ENTRIES: dict[str, Entry] = {}
_SHARD_ENTRIES: dict[str, Entry] = {}

_C = TypeVar("_C", bound=type[Compressor] | type[ShardedCompressor])


def register_compressor(name: str, *, aliases: Sequence[str] = (), **fixed: Any) -> Callable[[_C], _C]:
    """Decorates a compressor's class, so that ``comm_hook="<name>"`` makes one, also in YAML and in checkpoints.

    A `ShardedCompressor` gets the name for ``CommOptModelParallel``, and for ``CommOptDDP`` unless a `Compressor` has
    it there. Put the decorator above ``@dataclass(frozen=True, kw_only=True)``. The module must have been imported when
    the name is used; otherwise use the import path of the class as the name, ``comm_hook={"name":
    "my_package.topk.TopK"}``.

    Args:
        name: name in configurations; case, hyphens and underscores do not matter.
        aliases: further names, which plans and checkpoints replace by ``name``.
        **fixed: options that the name implies, with their values.

    Raises:
        ValueError: the name is taken, empty or "none", or has a dot, as import paths do.
    """

    def register(cls: _C) -> _C:
        entries = _SHARD_ENTRIES if issubclass(cls, ShardedCompressor) else _BUCKET_ENTRIES
        for written in (name, *aliases):
            if "." in written or normalize_name(written) in ("", "none"):
                raise ValueError(f"a compressor's name must not be empty or 'none', nor contain a dot, got {written!r}")
            existing = entries.get(normalize_name(written))
            if existing is not None and not (existing.name == name and _is_redefinition(existing.cls, cls)):
                raise ValueError(f"{written!r} is already the name of {import_path(existing.cls)}: choose another name")
        for written in (name, *aliases):
            entries[normalize_name(written)] = Entry(name, cls, fixed)
        return cls

    return register


def compressor_names() -> list[str]:
    """Returns the names that `compressor_from_config` knows, "none" first, without aliases."""
    return ["none", *sorted(registered())]


def sharded_names() -> list[str]:
    """Returns the names that `sharded_from_config` knows, "none" first, without aliases."""
    return ["none", *registered_shards()]


def canonical_name(name: object) -> str | None:
    """Returns the name that a plan would hold for a name or an alias as the user wrote it; None if it is unknown."""
    entry = entry_named(name)
    return None if entry is None else entry.name


def entry_named(name: object) -> Entry | None:
    """Returns the entry for buckets of a name or an alias as the user wrote it; None if it is unknown."""
    return spellings().get(normalize_name(name)) if isinstance(name, str) else None


def shards_entry_named(name: object) -> Entry | None:
    """Returns the entry for shards of a name or an alias as the user wrote it; None if it is unknown."""
    return _SHARD_ENTRIES.get(normalize_name(name)) if isinstance(name, str) else None


def spellings() -> dict[str, Entry]:
    """Returns the entries for buckets, by normalized names and aliases."""
    return _SHARD_ENTRIES | _BUCKET_ENTRIES


def names_with_option(option: str) -> list[str]:
    """Returns the names of the compressors that have this option."""
    return sorted(name for name, entry in registered().items() if option in entry.options)


def registered() -> dict[str, Entry]:
    """Returns the entries for buckets by name, without aliases."""
    return {entry.name: entry for entry in spellings().values()}


def registered_shards() -> dict[str, Entry]:
    """Returns the entries for shards by name, without aliases."""
    return {entry.name: entry for entry in _SHARD_ENTRIES.values()}


def compressor_name(compressor: Compressor | ShardedCompressor) -> str:
    """Returns the name that configurations use, or the name of the class if it is not registered."""
    if isinstance(compressor, FromShards):
        compressor = compressor.shards
    entry = entry_of(compressor)
    return type(compressor).__name__ if entry is None else entry.name


def import_path(cls: type) -> str:
    """Returns the module and the qualified name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_redefinition(earlier: type, cls: type) -> bool:
    """Returns whether a class was defined again: its module was reloaded, or a notebook's cell or script run again."""
    is_same_module = earlier.__module__ == cls.__module__ or "__main__" in (earlier.__module__, cls.__module__)
    return is_same_module and earlier.__qualname__ == cls.__qualname__


def entry_of(compressor: Compressor | ShardedCompressor) -> Entry | None:
    """Returns the entry of a compressor's class and fixed options; None if it is not registered."""
    for entry in (registered_shards() if isinstance(compressor, ShardedCompressor) else registered()).values():
        if type(compressor) is entry.cls and all(getattr(compressor, key) == entry.fixed[key] for key in entry.fixed):
            return entry
    return None
