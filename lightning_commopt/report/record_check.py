"""Whether the record of a run holds what it should: it is a file, and anybody may have written it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning_commopt.run_record import RunRecord


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_mapping_to(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_right, value.values()))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "Status": lambda value: value in ("running", "finished", "failed"),
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int | None": lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
    "float | None": lambda value: value is None or _is_number(value),
    "tuple[str, ...]": lambda value: all(isinstance(inner, str) for inner in value),
    "tuple[dict[str, Any], ...]": lambda value: all(isinstance(inner, dict) for inner in value),
    "dict[str, Any] | None": lambda value: value is None or isinstance(value, dict),
    "dict[str, float]": lambda value: _is_mapping_to(value, _is_number),
    "dict[str, str]": lambda value: _is_mapping_to(value, lambda inner: isinstance(inner, str)),
}


def check_record(record: RunRecord) -> None:
    """Checks types, which `RunRecord.load` takes as they are.

    Raises:
        ValueError: one of them is another.
    """
    for option in dataclasses.fields(record):
        value = getattr(record, option.name)
        if not _TYPES[str(option.type)](value):
            raise ValueError(f"{option.name} is {str(value)[:80]!r}, which is no {option.type}")
