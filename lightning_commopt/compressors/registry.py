"""Compressors by name, as a configuration writes them, and back. Each class registers itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from lightning_commopt.compressors.base import Compressor
from lightning_commopt.text.validation import did_you_mean, normalize_name

_may_import: ContextVar[bool] = ContextVar("may_import", default=True)


class Entry(NamedTuple):
    """A name, its class, and the options that the name stands for."""

    name: str
    cls: type[Compressor]
    fixed: Mapping[str, Any]

    @property
    def options(self) -> dict[str, bool]:
        """The names of the options, and whether each must be given."""
        return {name: is_needed for name, is_needed in options_of(self.cls).items() if name not in self.fixed}


def options_of(cls: type) -> dict[str, bool]:
    """Returns the names of the options of a dataclass, and whether each must be given."""
    return {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(cls)
        if field.init
    }


EXAMPLE = "example"
"""Key in the metadata of a field without a default: a value to try the compressor with."""

_BY_NORMALIZED_NAME: dict[str, Entry] = {}

_C = TypeVar("_C", bound=type[Compressor])


def register_compressor(name: str, *, aliases: Sequence[str] = (), **fixed: Any) -> Callable[[_C], _C]:
    """Decorates a compressor's class, so that ``comm_hook="<name>"`` makes one, also from YAML and in checkpoints.

    Stands above ``@dataclass(frozen=True, kw_only=True)``. The module must have been imported when the name is used;
    without that, the import path of the class is a name too: ``comm_hook={"name": "my_package.topk.TopK"}``.

    Args:
        name: to write in configurations; case, hyphens and underscores do not count.
        aliases: further names. What a plan or a checkpoint holds is ``name``.
        **fixed: options that the name stands for, with their values.

    Raises:
        ValueError: the name is taken, or it has a dot, as import paths do.
    """

    def register(cls: _C) -> _C:
        for written in (name, *aliases):
            if "." in written or normalize_name(written) in ("", "none"):
                raise ValueError(f"a compressor's name must not be empty or 'none', nor have a dot, got {written!r}")
            taken = _BY_NORMALIZED_NAME.get(normalize_name(written))
            if taken is not None and not (taken.name == name and _is_redefinition(taken.cls, cls)):
                raise ValueError(f"{written!r} is taken: it is the name of {_path(taken.cls)}")
        for written in (name, *aliases):
            _BY_NORMALIZED_NAME[normalize_name(written)] = Entry(name, cls, fixed)
        return cls

    return register


def compressor_names() -> list[str]:
    """Returns the names that `compressor_from_config` knows, "none" first, without aliases."""
    return ["none", *sorted(registered())]


def canonical_name(name: Any) -> str | None:
    """Returns the name that a plan would hold for a name as the user wrote it; None if there is none."""
    entry = _BY_NORMALIZED_NAME.get(normalize_name(name)) if isinstance(name, str) else None
    return None if entry is None else entry.name


def names_with_option(option: str) -> list[str]:
    """Returns the names of the compressors that have this option."""
    return sorted(name for name, entry in registered().items() if option in entry.options)


def registered() -> dict[str, Entry]:
    """Returns what is registered under each name, without aliases."""
    return {entry.name: entry for entry in _BY_NORMALIZED_NAME.values()}


@contextmanager
def without_imports() -> Iterator[None]:
    """Imports no module for a compressor within, for configurations that anybody may have written.

    A class is found there by its import path only if its module has been imported.
    """
    token = _may_import.set(False)
    try:
        yield
    finally:
        _may_import.reset(token)


def compressor_from_config(config: str | Mapping[str, Any] | Compressor | None) -> Compressor | None:
    """Builds a compressor from what a user writes.

    Args:
        config: a name; a mapping with ``name`` and that compressor's options (``inner`` of a wrapper is again any
            of these); or a compressor, which is returned as it is. Names are those of `register_compressor`, in any
            case, with or without underscores; or the import path of a class, see `without_imports`.

    Returns:
        The compressor, or None for None and "none".

    Raises:
        ValueError: unknown name or option, or an option's value is out of range.
        TypeError: ``config`` is none of these.
    """
    if config is None or isinstance(config, Compressor):
        return config
    if isinstance(config, type) and issubclass(config, Compressor):
        raise TypeError(f"must be a compressor, not its class: write {config.__name__}() instead of {config.__name__}")
    if callable(config) and not isinstance(config, Mapping):
        name = getattr(config, "__name__", type(config).__name__)
        raise TypeError(f"{name} is a function for DDP, not a compressor: write ddp_comm_hook={name}")
    if not isinstance(config, str | Mapping):
        raise TypeError(f"must be a name, a mapping with a name, or a compressor, got {config!r}")
    name, options = split_config(config, compressor_names())
    if name is None:
        return None
    entry = _entry(name)
    check_options(entry.name, entry.options, options)
    if "inner" in options:
        options["inner"] = compressor_from_config(options["inner"])
    return entry.cls(**entry.fixed, **options)


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


def compressor_to_config(compressor: Compressor, *, with_defaults: bool = True) -> dict[str, Any]:
    """Returns the mapping that `compressor_from_config` makes an equal compressor from, in types that JSON has.

    ``with_defaults`` adds the options that have their defaults.

    Raises:
        ValueError: there is none: the class is no dataclass, was defined in a function, or has a value that JSON has
            not.
    """
    cls = type(compressor)
    if not dataclasses.is_dataclass(compressor):
        raise ValueError(f"{cls.__qualname__} must be a dataclass, as its fields are the options")
    values = {
        field.name: getattr(compressor, field.name)
        for field in dataclasses.fields(compressor)
        if field.init and (with_defaults or getattr(compressor, field.name) != field.default)
    }
    entry = _entry_of(compressor)
    if entry is None and "<locals>" in cls.__qualname__:
        raise ValueError(f"{cls.__qualname__} has no import path: give it a name with @register_compressor")
    entry = entry or Entry(_path(cls), cls, {})
    options = {key: value for key, value in values.items() if key not in entry.fixed}
    if isinstance(options.get("inner"), Compressor):
        options["inner"] = compressor_to_config(options["inner"], with_defaults=with_defaults)
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"options of {entry.name!r} cannot be written as JSON ({error}): {options!r}") from None
    return {"name": entry.name, **options}


def compressor_name(compressor: Compressor) -> str:
    """Returns the name that configurations use, or that of the class where there is none."""
    entry = _entry_of(compressor)
    return type(compressor).__name__ if entry is None else entry.name


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_redefinition(earlier: type, cls: type) -> bool:
    """Returns whether a module was run once more: reloaded, a notebook's cell, or a script that is also imported."""
    is_same_module = earlier.__module__ == cls.__module__ or "__main__" in (earlier.__module__, cls.__module__)
    return is_same_module and earlier.__qualname__ == cls.__qualname__


def _entry_of(compressor: Compressor) -> Entry | None:
    for entry in registered().values():
        if type(compressor) is entry.cls and all(getattr(compressor, key) == entry.fixed[key] for key in entry.fixed):
            return entry
    return None


def _entry(name: Any) -> Entry:
    if isinstance(name, str) and "." in name:
        return Entry(name, _import_compressor(name), {})
    entry = _BY_NORMALIZED_NAME.get(normalize_name(name)) if isinstance(name, str) else None
    if entry is None:
        known = compressor_names()
        hint = did_you_mean(name, [*_BY_NORMALIZED_NAME, *known])
        raise ValueError(f"{name!r} is unknown; known names: {', '.join(known)}{hint}")
    return entry


def _import_compressor(path: str) -> type[Compressor]:
    module_name, _, class_name = path.rpartition(".")
    if not _may_import.get() and module_name not in sys.modules:
        raise ValueError(f"{path!r} is in a module that has not been imported, and no file may import one")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be imported ({type(error).__name__}: {error})") from error
    if not isinstance(found, type) or not issubclass(found, Compressor) or not dataclasses.is_dataclass(found):
        raise ValueError(f"{path!r} must be a subclass of Compressor and a dataclass, got {found!r}")
    return found


def check_options(name: str, known: Mapping[str, bool], given: Mapping[str, Any]) -> None:
    """Raises a ValueError unless all options are ``known``, see `options_of`, and all that must be given are."""
    unknown = [option for option in given if option not in known]
    if unknown:
        names, hint = ", ".join(known) or "no options", did_you_mean(unknown[0], known)
        raise ValueError(f"{name!r} has no option {', '.join(map(repr, unknown))}; it has: {names}{hint}")
    missing = [option for option, is_needed in known.items() if is_needed and option not in given]
    if missing:
        raise ValueError(f"{name!r} needs the option {', '.join(map(repr, missing))}")


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
    inner, entry = "", _entry_of(compressor)
    implied = {"matrix_rank", *(entry.fixed if entry else ())}
    fields: tuple[dataclasses.Field[Any], ...] = ()
    if dataclasses.is_dataclass(compressor):
        fields = dataclasses.fields(compressor)
    for field in fields:
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            inner = f" ({short_name(value)})"
        elif value != field.default and field.name not in implied:
            words.append(option_in_words(field.name, value))
    return f"{compressor_name(compressor)}{inner}{' ' if words else ''}{', '.join(words)}"


def option_in_words(name: str, value: Any) -> str:
    """Returns an option and its value in words.

    >>> option_in_words("error_feedback", False), option_in_words("start_step", 5)
    ('no error feedback', 'start 5')
    """
    words = _WORDS.get(name, name.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {f'{value:g}' if isinstance(value, float) else value}"
