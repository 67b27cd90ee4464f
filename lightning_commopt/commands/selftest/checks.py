"""The list of what the self-test checks, which `laws` and `on_device` fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_commopt.commands.selftest.places import TestDevices


class NotChecked(Exception):  # noqa: N818 (no error)
    """What is missing here for a check."""


class Found(NamedTuple):
    """What came of a check that measures.

    Attributes:
        detail: in words.
        numbers: by name, for the JSON.
    """

    detail: str
    numbers: dict[str, Any]


Runner = Callable[[TestDevices], "str | Found"]


@dataclass(frozen=True)
class Check:
    """One line of the self-test.

    Attributes:
        name: what holds.
        run: returns what was checked.
        is_extra: for ``--full`` only.
        is_on_ranks: runs on every rank; else in the command's process, and starts ranks itself.
    """

    name: str
    run: Runner
    is_extra: bool = False
    is_on_ranks: bool = True


CHECKS: list[Check] = []


def check(name: str, *, is_extra: bool = False, is_on_ranks: bool = True) -> Callable[[Runner], Runner]:
    """Adds a function to `CHECKS`. It raises an AssertionError that says what is wrong, or `NotChecked`."""

    def add(run: Runner) -> Runner:
        CHECKS.append(Check(name, run, is_extra, is_on_ranks))
        return run

    return add
