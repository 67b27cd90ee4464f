"""Runs the self-test: finds out where ranks can run, runs every check on them, collects what they say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from lightning_commopt.commands.info.info import collect
from lightning_commopt.commands.selftest import laws, on_device
from lightning_commopt.commands.selftest.checks import CHECKS, Check, NotChecked
from lightning_commopt.commands.selftest.places import TestDevices, candidates
from lightning_commopt.commands.selftest.ranks import PROCESSES, RankError, run_ranks
from lightning_commopt.text.terminal import TextTable

_FILLED_BY = laws, on_device
_LIMIT_S = 120
_GROUP_TIMEOUT_S = 60

Status = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one check.

    Attributes:
        name: what should hold.
        status: whether it does.
        detail: what was checked; what is wrong; or what is missing here.
        seconds: that it took.
    """

    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The outcome of the self-test, with all that somebody else needs to understand it.

    Attributes:
        place: where the ranks ran.
        refused: places that were better and could not be had, with why.
        outcomes: one for each check.
        info: versions, devices and backends.
    """

    place: str
    refused: dict[str, str]
    outcomes: list[Outcome]
    info: dict[str, Any]

    @property
    def has_failed(self) -> bool:
        return any(outcome.status == "failed" for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_selftest(device: str = "auto", on_start: Callable[[str], None] = lambda name: None) -> SelfTest:
    """Runs all checks on two ranks of this machine.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is a device.
        on_start: called with the name of each check before it runs.

    Raises:
        ValueError: the device is unknown, or there is none of its kind.
        RankError: ranks can run nowhere here.
    """
    PROCESSES.set_forkserver_preload(["lightning_commopt.commands.selftest.run"])
    refused: dict[str, str] = {}
    place = _first_that_works(candidates(device), refused)
    outcomes = []
    for check in CHECKS:
        on_start(check.name)
        outcomes.append(_run(check, place))
    return SelfTest(place=place.name, refused=refused, outcomes=outcomes, info=collect().to_dict())


def _first_that_works(places: list[TestDevices], refused: dict[str, str]) -> TestDevices:
    for place in places:
        try:
            _on_ranks(_try, place)
        except RankError as error:
            refused[place.name] = _last_line(error)
        else:
            return place
    raise RankError("; ".join(f"{name}: {why}" for name, why in refused.items()))


def _try(place: TestDevices) -> None:
    value = torch.ones(1, device=place.device(dist.get_rank()))
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()


def _run(check: Check, place: TestDevices) -> Outcome:
    start_s = time.monotonic()
    status: Status
    try:
        status, detail = _on_ranks(_run_on_rank, CHECKS.index(check), place)[0]
    except RankError as error:
        status, detail = "failed", _last_line(error)
    return Outcome(name=check.name, status=status, detail=detail, seconds=time.monotonic() - start_s)


def _run_on_rank(index: int, place: TestDevices) -> tuple[Status, str]:
    if place.device_type == "cuda":
        torch.cuda.set_device(place.device(dist.get_rank()))
    try:
        return "passed", CHECKS[index].run(place)
    except NotChecked as missing:
        return "not checked", str(missing)


def _on_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    place: TestDevices = args[-1]
    return run_ranks(
        fn,
        *args,
        limit_s=_LIMIT_S,
        group_timeout_s=_GROUP_TIMEOUT_S,
        backend=place.backend,
        environment=place.environment,
    )


def _last_line(error: RankError) -> str:
    return str(error).strip().splitlines()[-1].removeprefix("AssertionError: ")


_COLORS = {"passed": "green", "failed": "red", "not checked": "yellow"}


@contextmanager
def progress_lines(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is running: one line that changes on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield lambda text: print(f"running: {text}", file=console.file, flush=True)
        return
    with console.status("", spinner="line") as status:
        yield status.update


def print_selftest(found: SelfTest, console: Console) -> None:
    """Prints a row for each check, and where ranks could not run."""
    table = TextTable(found.place, "", "")
    for outcome in found.outcomes:
        table.add_row(outcome.name, Text(outcome.status, _COLORS[outcome.status]), outcome.detail)
    console.print(table)
    for place, why in found.refused.items():
        console.print(f"{place}: refused ({why})", highlight=False)
