"""`check_compressor`: it names the laws that are broken, and neither waits in vain nor leaves a process."""

import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_commopt.compressors import (
    Claims,
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Layout,
    LowRank,
    PowerSGD,
    Rounds,
    ShardedHierarchical,
    ShardedInt8,
    State,
)
from lightning_commopt.compressors.channel import AloneChannel, Channel
from lightning_commopt.plan import OptionError
from lightning_commopt.testing import LAWS, SHARDED_LAWS, check_compressor, conformance
from lightning_commopt.testing.places import CPU
from lightning_commopt.testing.ranks import DIED, RankError
from lightning_commopt.testing.steps import Net
from support.faulty_compressors import LOSSY, Faulty
from support.marked_processes import Program
from support.own_compressors import Averages
from support.ranks import run_ranks  # noqa: F401 - tells the fork server what to import


def _broken(compressor: Any, **options: Any) -> dict[str, str]:
    """Returns what `check_compressor` says of each law that is broken."""
    with pytest.raises(AssertionError) as raised:
        check_compressor(compressor, **options)
    return dict(re.findall(r"^(\w+(?: \(FSDP2\))?): (.+)\n    Law: ", str(raised.value), re.MULTILINE))


def test_a_broken_law_is_named() -> None:
    """If it fails, a user's test passes with a compressor that training goes wrong with."""
    assert list(_broken(Faulty(fault="talkative"), laws=["bytes_as_declared"])) == ["bytes_as_declared"]


@pytest.mark.exhaustive
def test_all_broken_laws_are_listed() -> None:
    """If it fails, somebody mends a compressor law by law, with a run of the tests for each."""
    laws = ["averages", "as_reference", "as_ddp", "small_and_unused"]
    assert list(_broken(Faulty(fault="inexact"), num_ranks=3)) == laws


@pytest.mark.exhaustive
def test_a_residual_that_is_lost_is_found() -> None:
    compressor, words = LOSSY["leaking"]
    assert words in _broken(compressor, laws=["averages"])["averages"]


@dataclass(frozen=True, kw_only=True)
class Stray(Averages):
    """Averages, but that the last rank strays: where it shows only with the messages of others, ``late`` is set."""

    how: str
    late: bool = False
    claims = Claims(is_lossy=False)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        yield from super().rounds(flat, layout, state, channel, residual)
        if channel.rank < channel.size - 1 or (self.late and isinstance(channel, AloneChannel)):
            return
        if self.how == "raises":
            raise ValueError("no gradient")
        if self.how == "dies":
            os._exit(3)
        yield channel.all_reduce(flat)  # waits for the others


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives without an answer raise after 2 s."""
    place = replace(CPU, timeout_s=2)
    monkeypatch.setattr(conformance, "find_place", lambda device, num_ranks: (place, {}))


def test_ranks_that_would_wait_are_found_before_they_do() -> None:
    """If it fails, a user's test suite waits for a minute in each law."""
    num_bytes = 4 * sum(parameter.numel() for parameter in Net().parameters())
    difference = f"collective 2 is none on rank 0, all_reduce of {num_bytes} bytes on rank 1"
    broken = _broken(Stray(how="waits"), laws=["tiny"])
    assert broken == {"same_collectives": f"in a step with random gradients {difference}"}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("impatient")
def test_ranks_that_wait_all_the_same_are_ended() -> None:
    """If it fails, a user's test suite hangs, or waits in each law anew."""
    broken = _broken(Stray(how="waits", late=True), laws=["averages", "tiny"])
    assert list(broken) == ["averages"]
    assert re.match(r"after \d+ s of waiting rank \d raised .*Timed out", broken["averages"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("late", "laws"), [(False, ["same_collectives"]), (True, ["averages", "tiny"])], ids=["at once", "late"]
)
def test_a_rank_that_raises(late: bool, laws: list[str]) -> None:
    """If it fails, the error of a compressor is hidden behind that of a rank that waits for it."""
    broken = _broken(Stray(how="raises", late=late), laws=["averages", "tiny"])
    assert list(broken) == laws
    for reason in broken.values():
        assert reason.startswith("rank 1 raised ")
        assert "ValueError: no gradient" in reason


@pytest.mark.exhaustive
def test_a_rank_that_dies() -> None:
    """If it fails, laws behind the first one are not tried, or nobody learns of a process that has gone."""
    words = (
        "rank 1: it died before it answered; gloo ends a process that receives a larger message than it has asked for"
    )
    assert _broken(Stray(how="dies", late=True), laws=["averages", "tiny"]) == {"averages": words, "tiny": words}


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ("Traceback:\n  of the rank\nValueError: no gradient", "raised ValueError: no gradient\nTraceback:"),
        (DIED, f": {DIED}; gloo ends a process that receives a larger message than it has asked for"),
    ],
)
def test_how_a_rank_has_failed(trace: str, words: str) -> None:
    """If it fails, an exception seems to be a process that has died, or the other way round."""
    assert words in conformance._in_words(RankError(f"rank 1 raised\n{trace}"))


def test_the_message_has_all_that_somebody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, who reads the error has to look up what a law says, or why others are not in it."""
    raised = "rank 1 raised ValueError: no gradient\nTraceback (most recent call last):\n  of the rank"
    answers = iter(["", "off by 1", raised, raised])
    monkeypatch.setattr(conformance, "find_place", lambda device, num_ranks: (CPU, {}))
    monkeypatch.setattr(conformance, "_try", lambda *trial: next(answers))
    with pytest.raises(AssertionError) as error:
        check_compressor(Stray(how="raises"), laws=["tiny", "ranks_agree", "resume"])
    law_of = {name: f"    Law: {law.statement}.\n    Else {law.consequence}." for name, law in LAWS.items()}
    assert str(error.value).split("\n\n") == [
        "Stray(how='raises', late=False) breaks 3 of 4 laws, on 2 ranks on the CPU, gloo:",
        f"ranks_agree: off by 1\n{law_of['ranks_agree']}",
        f"tiny: rank 1 raised ValueError: no gradient\n{law_of['tiny']}",
        "    Traceback (most recent call last):\n      of the rank",
        f"resume: rank 1 raised ValueError: no gradient\n{law_of['resume']}",
    ]
    words = "    Law: all ranks receive the same bits.\n    Else parameters drift apart between ranks."
    assert law_of["ranks_agree"] == words


def _local() -> Compressor:
    @dataclass(frozen=True, kw_only=True)
    class Local(Averages):
        """Only its place is wrong."""

    return Local()


@dataclass(frozen=True, kw_only=True)
class Locked(Averages):
    """Has an option that no other process can have."""

    lock: Any = field(default_factory=threading.Lock)


@pytest.mark.parametrize(
    ("compressor", "options", "error", "words"),
    [
        (PowerSGD, {}, TypeError, r"got <class .*>; make one: PowerSGD\(\.\.\.\)"),
        (
            _local(),
            {},
            TypeError,
            "Local cannot be pickled, .*: its class _local.<locals>.Local is local to",
        ),
        (Locked(), {}, TypeError, "Locked cannot be pickled, .*: TypeError: cannot pickle '_thread.lock' object"),
        (PowerSGD(), {"laws": ["avrages"]}, ValueError, "a law of PowerSGD must be one of .*; did you mean 'averages'"),
        (PowerSGD(), {"laws": ["unbiased"]}, ValueError, "a law of PowerSGD must be one of .*, got 'unbiased'"),
        (PowerSGD(), {"laws": "tiny"}, TypeError, r"for a single law: laws=\['tiny'\]"),
        (PowerSGD(), {"laws": []}, ValueError, "laws must name at least one law, got none"),
        (PowerSGD(), {"num_ranks": 5}, ValueError, "num_ranks must be one of 2, 3, 4, got 5"),
        (PowerSGD(), {"device": "tpu"}, ValueError, "device must be one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_what_cannot_be_checked(compressor: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    """If it fails, a mistake in a call ends in a traceback of multiprocessing, or passes as if all laws held."""
    with pytest.raises(error, match=words):
        check_compressor(compressor, **options)


@pytest.mark.exhaustive
def test_a_class_that_ranks_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a class of a notebook ends in a traceback that does not say what to do."""
    module: Any = ModuleType("module_of_this_process")
    module.Stray = Stray
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Stray, "__module__", module.__name__)
    with pytest.raises(
        TypeError, match=r"the ranks cannot make Stray\(.*ModuleNotFoundError: No module named 'module_of"
    ):
        check_compressor(Stray(how="dies"), laws=["same_collectives"])


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The laws that are tried, all of which seem to hold, and the strategies."""
    names: list[str] = []

    def hold(trial: Any, *others: Any) -> str:
        names.append(f"{trial.law.name} {trial.strategy}")
        return ""

    monkeypatch.setattr(conformance, "find_place", lambda device, num_ranks: (CPU, {}))
    monkeypatch.setattr(conformance, "why_unavailable", lambda place: "")
    monkeypatch.setattr(conformance, "_try", hold)
    return names


def test_what_is_left_out_without_comm_objects_is_said(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, laws for FSDP2 pass unchecked in silence."""
    monkeypatch.setattr(conformance, "why_unavailable", lambda place: "comm_hook needs torch >= 2.9")
    with pytest.warns(UserWarning, match=r"the laws for FSDP2 are not checked: comm_hook needs torch >= 2\.9"):
        check_compressor(ShardedInt8())
    assert tried == [f"{name} DDP" for name in LAWS]
    with pytest.raises(OptionError, match=r"needs torch >= 2\.9"):
        check_compressor(ShardedInt8(), laws=["unbiased"])


def test_a_compressor_of_shards_is_checked_with_both_strategies(tried: list[str]) -> None:
    """If it fails, a law is checked with one strategy only, or nothing guards it from waiting in vain."""
    check_compressor(ShardedInt8())
    assert tried == [*(f"{name} FSDP2" for name in SHARDED_LAWS), *(f"{name} DDP" for name in LAWS)]
    tried.clear()
    check_compressor(ShardedInt8(), laws=["unbiased"])
    check_compressor(ShardedInt8(), laws=["ranks_agree"])
    check_compressor(PowerSGD(), laws=["same_collectives"])
    of_ddp = ["same_collectives DDP", "ranks_agree DDP", "same_collectives DDP"]
    assert tried == ["same_collectives FSDP2", "unbiased FSDP2", *of_ddp]


@pytest.mark.exhaustive
def test_compositions_obey_the_laws() -> None:
    """If it fails, what is right in training is reported as broken."""
    on_nodes = Hierarchical(inner=LowRank(matrix_rank=2), ranks_per_node=2)
    check_compressor(ErrorFeedback(inner=on_nodes), num_ranks=4)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="FSDP2 takes other collectives from torch 2.9 on"
)
def test_compositions_of_shards_obey_the_laws() -> None:
    """If it fails, what is right in training with FSDP2 is reported as broken."""
    check_compressor(ShardedHierarchical(inner=ShardedInt8()))


_COMPRESSOR = """
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_commopt import AllReduce, Claims, Compressor
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.testing import check_compressor


@dataclass(frozen=True, kw_only=True)
class Mine(Compressor):
    factor: int = 1
    waits: bool = False
    claims = Claims(is_lossy=False)

    def rounds(self, flat, layout, state, channel, residual=None):
        yield from AllReduce().rounds(flat, layout, state, channel, residual)
        if self.waits and channel.rank == 0 and not isinstance(channel, AloneChannel):
            Path(__file__).with_suffix(".waits").touch()
            yield channel.all_reduce(flat)

    def wire_bytes(self, layout, world_size):
        return self.factor * layout.numel * layout.dtype.itemsize

"""
_TESTS = """
def test_mine():
    check_compressor(Mine())


@pytest.mark.parametrize("law", ["bytes_as_declared", "ranks_agree"])
def test_law(law):
    check_compressor(Mine(factor=2), laws=[law])
"""


def _program(folder: Path, source: str, *arguments: str) -> Program:
    (folder / "test_mine.py").write_text(_COMPRESSOR + source)
    return Program([*arguments, "test_mine.py"], folder)


@pytest.mark.exhaustive
def test_in_the_tests_of_a_user(tmp_path: Path) -> None:
    """If it fails, what is documented does not work in a file of tests, whose classes ranks import by its name."""
    program = _program(tmp_path, _TESTS, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider")
    assert program.wait(300), program.output
    assert "1 failed, 2 passed" in program.output
    assert "AssertionError: Mine(factor=2, waits=False) breaks 1 of 2 laws" in program.output
    assert "bytes_as_declared: " in program.output


@pytest.mark.exhaustive
def test_a_script_that_ranks_would_run_again(tmp_path: Path) -> None:
    """If it fails, a script without a guard hangs, or nobody can tell from its error what to do."""
    program = _program(tmp_path, "check_compressor(Mine())\n")
    assert program.wait(300), program.output
    assert program.process.returncode == 1
    assert 'A script must call check_compressor below `if __name__ == "__main__":`' in program.output


@pytest.mark.exhaustive
def test_an_interrupted_script_leaves_no_rank(tmp_path: Path) -> None:
    """If it fails, ranks wait for each other after Ctrl-C."""
    program = _program(tmp_path, 'if __name__ == "__main__":\n    check_compressor(Mine(waits=True))\n')
    deadline_s = time.monotonic() + 300
    while not (tmp_path / "test_mine.waits").exists():
        assert time.monotonic() < deadline_s, program.output
        time.sleep(0.1)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.wait(120), program.output
    assert "KeyboardInterrupt" in program.output
