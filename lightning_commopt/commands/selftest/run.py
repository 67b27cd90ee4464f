"""Runs the self-test: finds out where ranks can run, runs every check on them, collects their results."""

from __future__ import annotations

import math
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from lightning_commopt.commands.info.info import collect
from lightning_commopt.commands.selftest import diloco, laws, on_device, sharded_laws, variants
from lightning_commopt.commands.selftest.checks import CHECKS, Check, Measured, NotChecked
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.ranks import PROCESSES, OutOfTime, find_place, last_line, prepare_rank, run_on

_FILLED_BY = laws, sharded_laws, diloco, on_device, variants


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one check."""

    name: str  # what should hold
    status: Literal["passed", "failed", "not checked", "out of time"]
    detail: str  # what was checked; what is wrong; what is missing here; or how much time there was
    seconds: float = 0.0  # duration
    numbers: dict[str, Any] = field(default_factory=dict)  # measured values by name
    trace: str = ""  # whole traceback of a failure


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The outcome of the self-test, with everything that is needed to understand it elsewhere."""

    place: str  # where the ranks ran
    refused: dict[str, str]  # better places where ranks could not run, each with the reason
    outcomes: list[Outcome]  # one for each check so far
    is_whole: bool  # whether no check is still to come
    info: dict[str, Any]  # versions, devices and backends


def run_selftest(
    device: str = "auto",
    on_start: Callable[[str], None] = lambda name: None,
    on_news: Callable[[SelfTest], None] = lambda selftest: None,
    *,
    is_full: bool = False,
    limit_s: float = math.inf,
) -> SelfTest:
    """Runs all checks on two ranks of this machine.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is a device.
        on_start: called with the name of each check before it runs.
        on_news: called when the place is found, and with each new outcome at the end of ``outcomes``.
        is_full: run those for ``--full`` too.
        limit_s: seconds that all checks together may take; what does not fit is out of time.

    Raises:
        ValueError: the device is unknown, or there is none of its kind.
        RankError: ranks can run nowhere here.
    """
    PROCESSES.set_forkserver_preload(["lightning_commopt.commands.selftest.run"])
    ends_at = time.monotonic() + limit_s
    place, refused = find_place(device)
    place = replace(place, ends_at=ends_at)
    checks = [check for check in CHECKS if is_full or not check.is_extra]
    info = collect() | _versions()
    selftest = SelfTest(place=place.name, refused=refused, outcomes=[], is_whole=not checks, info=info)
    on_news(selftest)
    for check in checks:
        on_start(check.name)
        outcomes = [*selftest.outcomes, _run(check, place, limit_s)]
        selftest = replace(selftest, outcomes=outcomes, is_whole=len(outcomes) == len(checks))
        on_news(selftest)
    return selftest


def _versions() -> dict[str, Any]:
    """Returns the versions that matter to kernels on CUDA; None for a package that is missing."""
    versions: dict[str, Any] = {"cuda_version": torch.version.cuda, "triton_version": None, "driver_version": None}
    with suppress(PackageNotFoundError):
        versions["triton_version"] = version("triton")
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            printed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
            versions["driver_version"] = printed.split("\n")[0].strip()
    return versions


def _run(check: Check, place: Place, limit_s: float) -> Outcome:
    start_s = time.monotonic()
    try:
        if start_s >= place.ends_at:
            raise OutOfTime
        outcome = run_on(place, _run_on_rank, check.name)[0] if check.is_on_ranks else _try_check(check, place)
    except OutOfTime:
        late = f"the {limit_s:g} s for all checks (--limit-s) were over before this one had ended"
        outcome = Outcome(name=check.name, status="out of time", detail=late)
    except Exception as error:  # the file with the other results must be written
        trace = traceback.format_exc()
        outcome = Outcome(name=check.name, status="failed", detail=last_line(error), trace=trace)
    return replace(outcome, seconds=time.monotonic() - start_s)


def _run_on_rank(name: str, place: Place) -> Outcome:
    prepare_rank(place)
    # Checks are looked up by name, because the order of `CHECKS` depends on the order of imports.
    (check,) = (candidate for candidate in CHECKS if candidate.name == name)
    return _try_check(check, place)


def _try_check(check: Check, place: Place) -> Outcome:
    try:
        result = check.run(place)
    except NotChecked as missing:
        return Outcome(name=check.name, status="not checked", detail=str(missing))
    detail, numbers = result if isinstance(result, Measured) else (result, {})
    return Outcome(name=check.name, status="passed", detail=detail, numbers=numbers)


_COLORS = {"passed": "green", "failed": "red", "not checked": "yellow", "out of time": "yellow"}


@contextmanager
def progress_lines(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is running: one line that changes on a terminal, a line each elsewhere."""
    # FORCE_COLOR, which Jupyter sets, makes a pipe a terminal for rich, but no line of it can change.
    if not (console.is_terminal and console.file.isatty()):
        yield lambda text: print(f"running: {text}", file=console.file, flush=True)
        return
    with console.status("", spinner="line") as status:
        yield lambda text: status.update(escape(text))


def print_place(selftest: SelfTest, console: Console) -> None:
    """Prints where ranks run, and where they could not."""
    console.print(selftest.place, highlight=False, markup=False)
    for place, reason in selftest.refused.items():
        console.print(f"{place}: refused ({reason})", highlight=False, markup=False)


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Prints the result of one check."""
    console.print(Text.assemble((outcome.status, _COLORS[outcome.status]), f": {outcome.name}"))
    console.print(Padding(Text(f"{outcome.detail} ({outcome.seconds:.1f} s)"), (0, 0, 0, 4)))


def print_sum(selftest: SelfTest, console: Console) -> None:
    """Prints the number of checks with each status."""
    numbers: Counter[str] = Counter(outcome.status for outcome in selftest.outcomes)
    shown = ", ".join(f"{numbers[status]} {status}" for status in _COLORS if numbers[status])
    console.print(shown + ("" if selftest.is_whole else "; interrupted before the others"), highlight=False)
