"""Values that a type checker takes for optional."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def known(value: _T | None) -> _T:
    """Returns a value that must not be None."""
    assert value is not None
    return value
