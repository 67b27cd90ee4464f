"""Ranks that Lightning's launchers and torchrun start, in an environment of their own."""

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lightning_commopt import CommOptDDP
from support.marked_processes import Program
from support.ranks import run_ranks
from support.side_by_side import two_at_a_time
from support.strategy_models import Params, SelfFed, assert_same, numbers, trainer

_FOLDER = Path(__file__).parent
_SCRIPT = str(_FOLDER / "launched_script.py")
_TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
_LIMIT_S = 200

pytestmark = pytest.mark.exhaustive  # programs that import everything, several times


def _run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Runs Python; returns its status and output. No process outlives the call."""
    program = Program(arguments, folder)
    return program.finish(_LIMIT_S), program.output


def _fit() -> Params:
    module = SelfFed()
    trainer(CommOptDDP()).fit(module)
    return numbers(module)


@cache
def _expected() -> Params:
    return run_ranks(_fit)[0]


def _trained(path: Path, start_method: str) -> Params:
    with np.load(path) as saved:
        return {name.split()[1]: saved[name] for name in saved if name.split()[0] == start_method}


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[tuple[Path, int, str]]]]:
    def run(words: str) -> tuple[Path, int, str]:
        folder = tmp_path_factory.mktemp("launched")
        *torchrun, start_methods = words.split(": ")
        launcher = _TORCHRUN if torchrun else []
        return folder, *_run([*launcher, _SCRIPT, "params.npz", *start_methods.split()], folder)

    with two_at_a_time(request, "end", run) as started:
        yield started


@pytest.fixture
def end(request: pytest.FixtureRequest, ends: dict[str, Future[tuple[Path, int, str]]]) -> tuple[Path, int, str]:
    """The folder in which the script ran with such words, its status, and what it said."""
    return ends[request.param].result()


@pytest.mark.parametrize(
    ("end", "start_methods"),
    [
        ("spawn", ["spawn"]),
        ("torchrun: popen", ["popen"]),
    ],
    indirect=["end"],
    ids=["spawn", "torchrun"],
)
def test_trains_in_ranks_that_a_launcher_starts(end: tuple[Path, int, str], start_methods: list[str]) -> None:
    """If it fails, the strategy does not train in ranks that Lightning or torchrun starts, or leaves a process."""
    folder, status, output = end
    assert status == 0, output
    for start_method in start_methods:
        assert_same(_trained(folder / "params.npz", start_method), _expected(), rtol=1e-6)


@pytest.mark.parametrize("end", ["popen --breaks"], indirect=True)
def test_exception_in_a_launched_rank(end: tuple[Path, int, str]) -> None:
    """If it fails, an exception in one rank leaves the others hanging, or is not shown."""
    _, status, output = end
    assert status != 0
    assert "ArithmeticError" in output
    assert "broken on purpose" in output
