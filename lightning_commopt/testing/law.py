"""What a law is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_commopt.testing.steps import Setup

Holds = Callable[[Setup, str, Any], None]
"""Runs on every rank. Raises an AssertionError that says what is wrong, after the last collective."""


@dataclass(frozen=True)
class Law:
    """What holds for every compressor. ``law(setup, name, compressor)`` checks it, on every rank of a process group.

    Attributes:
        name: its name in ``check_compressor(..., laws=[name])``.
        statement: what holds, in a line.
        consequence: what it means for training if it does not hold, in a line that follows the word "Else".
        holds: raises an AssertionError that begins with the compressor's name and says what is wrong.
    """

    name: str
    statement: str
    consequence: str
    holds: Holds

    def __call__(self, setup: Setup, name: str, compressor: Any) -> None:
        self.holds(setup, name, compressor)
