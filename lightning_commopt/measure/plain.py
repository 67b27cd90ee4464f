"""CSV and JSON files. JSON is written atomically, and read into dataclasses with checks of the annotated types."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_commopt.text.formatting import escape_controls

# Numbers whose names end with these suffixes cannot be below 0: they are seconds, bytes or rates.
_AMOUNTS = ("_s", "_bytes", "_per_byte", "_per_message", "seconds")

_FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # noqa: RUF001

_T = TypeVar("_T")


def _refuse(constant: str) -> None:
    raise ValueError(f"a number is {constant}")


_FINITE = json.JSONDecoder(parse_constant=_refuse)
_type_hints = cache(get_type_hints)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON into a file as `write_whole` does."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def write_whole(path: Path, text: str, *, newline: str | None = None) -> None:
    """Writes text into a file so that a reader sees the old content or the new, never a part.

    A pipe or a device, such as ``/dev/stdout``, is written to as it is. Lone surrogates, which UTF-8 cannot encode,
    become escapes.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    text_options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": newline}
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, **text_options)
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text, **text_options)
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
    except OSError as error:  # its own text names no file if the disk is full, and else the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], first: Iterable[str] = ()) -> None:
    """Writes a CSV table with a column for each name in any row; the names in ``first`` come first.

    Control characters in text are escaped. Text that spreadsheets would evaluate as a formula gets a leading
    apostrophe, with which they show it unchanged.
    """
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(map(_cell, names))
    writer.writerows([_cell(row.get(name, "")) for name in names] for row in rows)
    write_whole(path, table.getvalue(), newline="")


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = escape_controls(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA_STARTS) and not _are_numbers(text) else text


def _are_numbers(text: str) -> bool:
    """Returns whether a text is a number, or several with semicolons between them."""
    try:
        [float(part) for part in text.split(";")]
    except ValueError:
        return False
    return True


def load_json(path: Path, kind: str, newest_format: int, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Reads a JSON file of our commands, of a kind and up to a format; ``read`` makes the result from its object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or is incomplete.
    """
    plain = read_object(path, f"result of {kind}")
    if plain.get("kind") != kind:
        raise ValueError(f"{path} is not a result of {kind}: its kind is {plain.get('kind')!r}")
    check_format(path, plain.get("format"), newest_format)
    with errors_naming(path):
        result = read(plain)
        check_numbers(result)
    return result


def check_format(path: Path, version: object, newest: int) -> None:
    """Raises a ValueError unless the format of a file is a number up to the ``newest`` that this version reads."""
    if not isinstance(version, int) or version > newest:
        raise ValueError(
            f"{path} has format {version!r}, but this version reads formats up to {newest}: install a later"
            " lightning_commopt"
        )


def read_object(path: Path, content: str, *, allow_nan: bool = True) -> dict[str, Any]:
    """Reads a JSON object from a file; a ValueError names the file, the ``content`` it should have, and the reason."""
    try:
        plain = parse_json(path.read_bytes(), allow_nan=allow_nan)
    except ValueError as error:
        raise ValueError(f"{path} is not a {content}, or was cut: {error}") from None
    if not isinstance(plain, dict):
        raise ValueError(f"{path} is not a {content}: it holds a JSON {type(plain).__name__}, not an object")
    return plain


def parse_json(data: bytes, *, allow_nan: bool = True) -> Any:
    """Parses JSON; a ValueError has the reason in a few words. ``allow_nan`` also allows infinities."""
    try:
        text = data.decode("utf-8")
        return json.loads(text) if allow_nan else _FINITE.decode(text)
    except UnicodeDecodeError:
        raise ValueError("it is binary") from None
    except json.JSONDecodeError as error:
        place = f"in line {error.lineno}" if b"\n" in data.strip() else f"at character {error.pos}"
        raise ValueError(f"{error.msg} {place}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def errors_naming(path: Path) -> Generator[None, None, None]:
    """Turns errors about the content of a file into a ValueError that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def check_numbers(value: Any, name: str = "") -> None:
    """Checks a number, or all numbers in dataclasses, named tuples and sequences; ``name`` is the field that holds it.

    They must be finite, and times and sizes must not be negative. Numbers in a mapping, such as metrics, are not
    checked.

    Raises:
        ValueError: a number violates this; the message has its field and its value.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(inner, float):
                check_numbers(inner, f"{name}[{key!r}]")
    elif names := getattr(value, "_fields", None) or tuple(getattr(value, "__dataclass_fields__", ())):
        for field in names:
            check_numbers(getattr(value, field, None), f"{name}.{field}".removeprefix("."))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            check_numbers(inner, f"{name}[{index}]")
    elif isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, which is not a finite number")
        if value < 0 and re.sub(r"\[\d+\]", "", name).endswith(_AMOUNTS):
            raise ValueError(f"{name} is {value}, which is below 0")


def from_plain(cls: type[_T], plain: Any) -> _T:
    """Returns a dataclass or named tuple, which may contain others, from a JSON object; a named tuple from a list, too.

    An int is accepted for a float, but a bool is not a number. Keys of later versions are ignored.

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
    """Returns a field's value in the type of its annotation: sequences as tuples, objects as mappings or classes."""
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
    allowed = f"one of {', '.join(map(repr, inner))}" if origin is Literal else getattr(hint, "__name__", hint)
    raise ValueError(f"{name} is {str(value)[:80]!r}, which is not {allowed}")
