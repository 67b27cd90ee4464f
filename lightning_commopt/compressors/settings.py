"""Checks of the settings of compressors."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_integer(name: str, value: Any, at_least: int) -> None:
    """Checks a whole number.

    Raises:
        ValueError: it is no integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")


def check_switch(name: str, value: Any) -> None:
    """Checks a truth value.

    Raises:
        ValueError: it is something else, such as the string "false".
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
