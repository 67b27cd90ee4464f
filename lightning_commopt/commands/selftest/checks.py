"""The list of what the self-test checks, which other modules of this folder fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_commopt.testing.places import Place


class NotChecked(Exception):  # noqa: N818 (no error)
    """A check cannot run on this machine; the message names what is missing."""


class Measured(NamedTuple):
    """The result of a check that measures something."""

    detail: str  # the result in words
    numbers: dict[str, Any]  # measured values by name, for the JSON


Runner = Callable[[Place], "str | Measured"]


@dataclass(frozen=True)
class Check:
    """One line of the self-test."""

    name: str  # what holds if it passes
    run: Runner  # does the check, and returns what was checked
    is_extra: bool = False  # whether it runs with ``--full`` only
    is_on_ranks: bool = True  # whether every rank runs it; otherwise the command's process does, and it starts ranks


CHECKS: list[Check] = []


def check(
    name: str, *, is_extra: bool = False, is_on_ranks: bool = True, needs_cuda: bool = False
) -> Callable[[Runner], Runner]:
    """Adds a function to `CHECKS`. It raises an AssertionError that says what is wrong, or `NotChecked`."""

    def add(run: Runner) -> Runner:
        def run_where_possible(place: Place) -> str | Measured:
            if needs_cuda and place.device_type == "cpu":
                raise NotChecked("no CUDA device")
            return run(place)

        CHECKS.append(Check(name, run_where_possible, is_extra, is_on_ranks))
        return run

    return add
