"""Runs the self-test: finds out where ranks can run, runs every check on them, collects their results."""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lightning_commopt.commands.info.info import collect
from lightning_commopt.commands.selftest import laws, on_device, sharded_laws, variants
from lightning_commopt.commands.selftest.checks import CHECKS, Check, Found, NotChecked, TestDevices, candidates
from lightning_commopt.commands.selftest.ranks import PROCESSES, RankError, run_on
from lightning_commopt.text.terminal import TextTable

_FILLED_BY = laws, sharded_laws, on_device, variants
LIMIT_S = 300.0
"""After so long no other check is started."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one check."""

    name: str  # what should hold
    status: Literal["passed", "failed", "not checked"]
    detail: str  # what was checked; what is wrong; or what is missing here
    seconds: float = 0.0  # that it took
    numbers: dict[str, Any] = field(default_factory=dict)  # that were measured, by name
    trace: str = ""  # of the failure, whole


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The outcome of the self-test, with all that somebody else needs to understand it."""

    place: str  # where the ranks ran
    refused: dict[str, str]  # places that were better and could not be had, with why
    outcomes: list[Outcome]  # one for each check
    info: dict[str, Any]  # versions, devices and backends


def run_selftest(
    device: str = "auto",
    on_start: Callable[[str], None] = lambda name: None,
    *,
    is_full: bool = False,
    limit_s: float = LIMIT_S,
) -> SelfTest:
    """Runs all checks on two ranks of this machine.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is a device.
        on_start: called with the name of each check before it runs.
        is_full: run those for ``--full`` too.
        limit_s: seconds after which no other check is started.

    Raises:
        ValueError: the device is unknown, or there is none of its kind.
        RankError: ranks can run nowhere here.
    """
    PROCESSES.set_forkserver_preload(["lightning_commopt.commands.selftest.run"])
    refused: dict[str, str] = {}
    for place in candidates(device):
        try:
            run_on(place, _try)
            break
        except RankError as error:
            refused[place.name] = _last_line(error)
    else:
        raise RankError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    outcomes, start_s = [], time.monotonic()
    for check in CHECKS:
        if check.is_extra and not is_full:
            continue
        if time.monotonic() - start_s > limit_s:
            late = f"the checks before it took more than {limit_s:g} s"
            outcomes.append(Outcome(name=check.name, status="not checked", detail=late))
            continue
        on_start(check.name)
        outcomes.append(_run(check, place))
    return SelfTest(place=place.name, refused=refused, outcomes=outcomes, info=collect() | _versions())


def _versions() -> dict[str, Any]:
    """Returns versions that matter to kernels on CUDA; None of what there is not."""
    found: dict[str, Any] = {"cuda_version": torch.version.cuda, "triton_version": None, "driver_version": None}
    with suppress(PackageNotFoundError):
        found["triton_version"] = version("triton")
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            printed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
            found["driver_version"] = printed.split("\n")[0].strip()
    return found


def _try(place: TestDevices) -> None:
    value = torch.ones(1, device=place.device(dist.get_rank()))
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()


def _run(check: Check, place: TestDevices) -> Outcome:
    start_s = time.monotonic()
    try:
        outcome = run_on(place, _run_on_rank, check.name)[0] if check.is_on_ranks else _try_check(check, place)
    except Exception as error:  # the file with the other results must be written
        trace = traceback.format_exc()
        outcome = Outcome(name=check.name, status="failed", detail=_last_line(error), trace=trace)
    return replace(outcome, seconds=time.monotonic() - start_s)


def _run_on_rank(name: str, place: TestDevices) -> Outcome:
    if place.device_type == "cuda":
        torch.cuda.set_device(place.device(dist.get_rank()))
    (check,) = (each for each in CHECKS if each.name == name)  # the order is that of imports, which differs
    return _try_check(check, place)


def _try_check(check: Check, place: TestDevices) -> Outcome:
    try:
        found = check.run(place)
    except NotChecked as missing:
        return Outcome(name=check.name, status="not checked", detail=str(missing))
    detail, numbers = found if isinstance(found, Found) else (found, {})
    return Outcome(name=check.name, status="passed", detail=detail, numbers=numbers)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].removeprefix("AssertionError: ")


_COLORS = {"passed": "green", "failed": "red", "not checked": "yellow"}


@contextmanager
def progress_lines(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is running: one line that changes on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield lambda text: print(f"running: {text}", file=console.file, flush=True)
        return
    with console.status("", spinner="line") as status:
        yield lambda text: status.update(escape(text))


def print_selftest(found: SelfTest, console: Console) -> None:
    """Prints a row for each check, and where ranks could not run."""
    table = TextTable(found.place, "", "")
    for outcome in found.outcomes:
        table.add_row(outcome.name, Text(outcome.status, _COLORS[outcome.status]), outcome.detail)
    console.print(table)
    for place, why in found.refused.items():
        console.print(f"{place}: refused ({why})", highlight=False, markup=False)
