"""The list of what the self-test checks, which `laws` and `on_device` fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_commopt.commands.selftest.places import TestDevices


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
    run: Callable[[TestDevices], str]


CHECKS: list[Check] = []


def check(name: str) -> Callable[[Callable[[TestDevices], str]], Callable[[TestDevices], str]]:
    """Adds a function to `CHECKS`. It raises an AssertionError that says what is wrong, or `NotChecked`."""

    def add(run: Callable[[TestDevices], str]) -> Callable[[TestDevices], str]:
        CHECKS.append(Check(name, run))
        return run

    return add
