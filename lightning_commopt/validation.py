"""Checks of the settings of compressors, and what is said of those that have no effect."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

_said: set[str] = set()


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


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Checks one of several values.

    Raises:
        ValueError: it is none of them.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_power_of_two(name: str, value: Any, at_least: int, at_most: int) -> None:
    """Checks a power of two.

    Raises:
        ValueError: it is no integer, none that is a power of two, or out of range.
    """
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not at_least <= value <= at_most or value & (value - 1):
        raise ValueError(f"{name} must be a power of two from {at_least} to {at_most}, got {value!r}")


def warn_once(message: str) -> None:
    """Warns on rank 0, once for each message."""
    if message not in _said:
        _said.add(message)
        rank_zero_warn(message)
