"""What all tests share: which of them run, and on which machine they can. Both folders of tests register it."""

import atexit
import gc
import os
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from lightning_commopt.launch.environment import RANK_VARIABLES
from lightning_commopt.launch.lab import why_not

# Else pytest rewrites the assertions of all tests in each run, and each process that a test starts compiles this
# checkout anew: half of the time until the first test runs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Threads of numpy would spin while they wait for cores that other tests use.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_LEFT_OUT = pytest.StashKey[int]()
_LONG = (
    *(".", "callbacks", "watch", "compressors", "strategy", "train/sweep", "streams", "train/workloads", "launch"),
    "commands/selftest",
)
_PLACES = {Path(__file__).parents[1] / folder: place for place, folder in enumerate(_LONG)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run what is marked exhaustive")
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption(
        "--part", metavar="I/N", default="1/1", help="with --all: the I-th of N parts of what is exhaustive"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports all tests without the garbage collector, which would look through all that they import again and again.

    None of that is ever garbage: a third of the time until the first test runs.
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries print what of theirs is left when the process ends
    return result


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for examples in docstrings only in files that have some; pytest would look through all others, too."""
    collectors = yield
    return [one for one in collectors if type(one) is pytest.Module or ">>>" in file_path.read_text(encoding="utf-8")]


@pytest.hookimpl(trylast=True)  # behind -k and -m, so that only what they select is counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked exhaustive, unless it is asked for: by --all and --part, or by its name after ``::``.

    Makes warnings within tests errors, and those alone: plugins that somebody has installed may warn while pytest
    starts. Some versions of torch warn of their own functions for CUDA.

    Files that take long come first, the programs beside this file before all: at the end one would keep a single
    worker busy.
    """
    for item in items:
        # Fits of tests are shorter than the momentum of DiLoCo's outer optimizer wants them.
        item.add_marker(pytest.mark.filterwarnings("ignore:outer_momentum="), append=False)
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)  # below all that a test asks for
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default::UserWarning:torch"))
    items.sort(key=lambda item: _PLACES.get(item.path.parent, len(_PLACES)))
    if any("::" in argument for argument in config.args):
        return
    number, num_parts = map(int, config.getoption("--part").split("/"))
    is_all = config.getoption("--all")
    left_out: list[pytest.Item] = []
    kept: list[pytest.Item] = []
    for item in items:
        is_in_part = is_all and zlib.crc32(item.nodeid.encode()) % num_parts == number - 1
        (kept if is_in_part or not item.get_closest_marker("exhaustive") else left_out).append(item)
    _count_left_out(config, len(left_out))
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _count_left_out(config: pytest.Config, number: int) -> None:
    config.stash[_LEFT_OUT] = number
    if hasattr(config, "workeroutput"):  # this is a worker of xdist, which tells the process that reports
        config.workeroutput["left_out"] = number


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns one worker more than there are cores, as tests wait, but at most 4; none where files are named."""
    return min(4, len(os.sched_getaffinity(0)) + 1) if config.args == config.getini("testpaths") else 0


def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter", config: pytest.Config) -> None:
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"a cross-section: {left_out} more of the same run with --all")


@pytest.fixture(autouse=True)
def leaves_no_rank_and_no_job() -> Iterator[None]:
    """Fails a test that leaves this process as a rank: later ones would take it for one. Ends a job of Hydra's."""
    before = os.environ.keys() & set(RANK_VARIABLES)
    yield
    assert os.environ.keys() & set(RANK_VARIABLES) == before, "run it in processes of its own, with run_ranks"
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="module", autouse=True)
def ends_warm_ranks() -> Iterator[None]:
    """Ends the ranks that a file of tests has kept; the next one starts its own."""
    yield
    if warm_ranks := sys.modules.get("support.warm_ranks"):
        warm_ranks.end_ranks()


@pytest.fixture(scope="session", autouse=True)
def computes_with_one_thread() -> None:
    """Keeps torch to one thread in this process: several would spin while they wait for cores that other tests use.

    Ranks have one thread as well. Tests that need more set their number themselves.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def signals_count() -> None:
    """Makes tests that interrupt themselves the same in the background and under nohup, where signals are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Returns a function that compares what people read with a file of a name in ``golden``, beside the test."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        path, written = folder / f"{name}.txt", text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(written, encoding="utf-8")
        assert path.read_text(encoding="utf-8").splitlines() == written.splitlines(), "is it better? --update-golden"

    return compare


@pytest.fixture
def port() -> int:
    """Returns a port of this machine at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skips a test that needs the lab on a machine that cannot make one, for the reason that users are told."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
