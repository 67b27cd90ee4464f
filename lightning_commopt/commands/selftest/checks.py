"""The list of what the self-test checks, which `laws` and `on_device` fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_commopt.commands.selftest.places import Place


class NotChecked(Exception):  # noqa: N818 (no error)
    """What is missing here for a check."""


@dataclass(frozen=True)
class Check:
    """One line of the self-test.

    Attributes:
        name: what holds.
        run: runs on every rank, and returns what was checked.
    """

    name: str
    run: Callable[[Place], str]


CHECKS: list[Check] = []


def check(name: str) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    """Adds a function to `CHECKS`. It raises an AssertionError that says what is wrong, or `NotChecked`."""

    def add(run: Callable[[Place], str]) -> Callable[[Place], str]:
        CHECKS.append(Check(name, run))
        return run

    return add
