"""CSV and JSON files: JSON is written atomically, and read into dataclasses of the annotated types."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_type_hints = cache(get_type_hints)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON into a file so that a reader sees the old content or the new, never a part."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], first: Iterable[str] = ()) -> None:
    """Writes a CSV table with a column for each name in some row, those in ``first`` before others."""
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names), restval="")
        writer.writeheader()
        writer.writerows(rows)


def load_json(path: Path, kind: str, newest_format: int, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Reads a JSON file of our commands, of a kind and up to a format; ``read`` makes the result from its object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or is incomplete.
    """
    try:
        plain = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = "it is binary" if isinstance(error, UnicodeDecodeError) else f"{error.msg} in line {error.lineno}"
        raise ValueError(f"{path} is no result of {kind}, or was cut: {reason}") from None
    if not isinstance(plain, dict) or plain.get("kind") != kind:
        raise ValueError(f"{path} is no result of {kind}")
    if not isinstance(plain.get("format"), int) or plain["format"] > newest_format:
        raise ValueError(f"{path} has format {plain.get('format')!r}; this version reads up to {newest_format}")
    try:
        return read(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def from_plain(cls: type[_T], plain: Any) -> _T:
    """Returns a dataclass or named tuple, which may contain others, from a JSON object; a named tuple from a list, too.

    An int is accepted for a float, a bool for no number. Keys of later versions are ignored.

    Raises:
        TypeError: a field without a default is missing.
        ValueError: a field has another type; the message has its name.
    """
    if isinstance(plain, list):
        plain = dict(zip(getattr(cls, "_fields", ()), plain, strict=False))
    if not isinstance(plain, dict):
        raise ValueError(f"{str(plain)[:80]!r} is not the JSON object of a {cls.__name__}")
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    return cls(**{name: _read(hint, plain[name], name) for name, hint in hints.items() if name in plain})


def _read(hint: Any, value: Any, name: str) -> Any:
    """Returns the value of a field as its annotation has it: sequences as tuples, objects as mappings or classes."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and NoneType in inner) or (origin is Literal and value in inner):
        return value
    if NoneType in inner:
        return _read(inner[0], value, name)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return from_plain(hint, value)
    if origin in (tuple, Sequence) and isinstance(value, (list, tuple)):
        is_fixed = origin is tuple and inner[-1] is not Ellipsis
        if not is_fixed or len(value) == len(inner):
            return tuple(_read(inner[at if is_fixed else 0], element, name) for at, element in enumerate(value))
    elif origin is list and isinstance(value, list):
        return [_read(inner[0], element, name) for element in value]
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(inner[1], element, name) for key, element in value.items()}
    elif origin is None:
        is_number = hint in (int, float)
        if isinstance(value, (int, float) if hint is float else hint) and not (is_number and isinstance(value, bool)):
            return value
    raise ValueError(f"{name} is {str(value)[:80]!r}, which is not {getattr(hint, '__name__', hint)}")
