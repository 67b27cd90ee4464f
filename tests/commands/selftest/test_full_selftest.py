"""What ``--full`` checks, as far as that is possible without a GPU."""

import io
import json
import os
import signal
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from rich.console import Console

from lightning_commopt.commands.selftest import on_device, run, variants
from lightning_commopt.commands.selftest.checks import CHECKS, Check, Measured, NotChecked, Runner
from lightning_commopt.commands.selftest.run import (
    Outcome,
    SelfTest,
    print_outcome,
    print_place,
    print_sum,
    progress_lines,
    run_selftest,
)
from lightning_commopt.compressors import Int8
from lightning_commopt.testing import ranks
from lightning_commopt.testing.places import CPU, Place
from support.commopt import commopt
from support.ranks import RankError, run_ranks

GPU = Place(name="a GPU", device_type="cuda", backend="cpu:gloo,cuda:nccl")
ERROR = "RuntimeError: [/opt/gloo/transport] Connection closed by peer [127.0.0.1]:4711"


def named(begin: str) -> Check:
    """Returns the check whose name begins so."""
    (found,) = (check for check in CHECKS if check.name.startswith(begin))
    return found


@pytest.mark.exhaustive
def test_the_extra_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, something of ``--full`` is broken, but for the laws, which have tests of their own."""
    extra = [check for check in CHECKS if check.is_extra and not check.name.endswith("; in several buckets")]
    monkeypatch.setattr(run, "CHECKS", extra)
    written = tmp_path / "selftest.json"
    commopt("selftest", "--full", "--device", "cpu", "--output", written, "--limit-s", 3000)
    found = json.loads(written.read_text())
    statuses = {outcome["name"]: outcome["status"] for outcome in found["outcomes"]}
    assert len(statuses) == len(extra)
    assert {name for name, status in statuses.items() if status != "passed"} == {
        "nothing is compiled after the hook is attached",
        "compute-sanitizer finds no fault in a bucket of odd size",
        "the hang monitor names a rank that fails on its device",
    }
    (costs,) = (outcome["numbers"] for outcome in found["outcomes"] if outcome["name"].startswith("what a bucket"))
    assert all(cost["host_us"] > 0 for cost in costs.values())
    assert {"triton_version", "driver_version", "cuda_version"} <= set(found["info"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_on_cuda() -> None:
    """If it fails, something does not hold on this GPU: see its trace."""
    found = run_selftest("cuda", is_full=True)
    assert [outcome for outcome in found.outcomes if outcome.status == "failed"] == []


def _fail(place: Place) -> str:
    raise AssertionError(ERROR)


def _measure(place: Place) -> Measured:
    return Measured("two numbers", {"first": 1.0, "second": [2]})


def _miss(place: Place) -> str:
    raise NotChecked("needs [something]")


SOME_CHECKS = [
    Check("fails", _fail),
    Check("fails by itself", _fail, is_on_ranks=False),
    Check("measures", _measure),
    Check("is missing", _miss, is_on_ranks=False),
    Check("is extra", _measure, is_extra=True, is_on_ranks=False),
]


@pytest.fixture
def some_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the checks, in this process and in the ranks that are forked without it."""

    def here(place: Place, fn: Any, *args: Any) -> list[Any]:
        return [fn(*args, place)]

    monkeypatch.setattr(run, "CHECKS", SOME_CHECKS)
    monkeypatch.setattr(run, "run_on", here)
    monkeypatch.setattr(run, "find_place", lambda device: (CPU, {}))


@pytest.mark.usefixtures("some_checks")
def test_what_a_check_says_comes_out_whole(tmp_path: Path) -> None:
    """If it fails, an error text in brackets ends the command before anything is written, or its trace is lost."""
    written = tmp_path / "selftest.json"
    output = commopt("selftest", "--device", "cpu", "--output", written, status=1).output
    assert "[/opt/gloo/transport]" in output.replace("\n", "")
    outcomes = {each["name"]: each for each in json.loads(written.read_text())["outcomes"]}
    assert list(outcomes) == ["fails", "fails by itself", "measures", "is missing"]
    for name in ("fails", "fails by itself"):
        assert outcomes[name]["detail"] == ERROR
        assert outcomes[name]["trace"].startswith("Traceback")
        assert "in _fail" in outcomes[name]["trace"]
    assert outcomes["measures"]["numbers"] == {"first": 1.0, "second": [2]}
    assert (outcomes["is missing"]["status"], outcomes["is missing"]["trace"]) == ("not checked", "")


@pytest.mark.usefixtures("some_checks")
@pytest.mark.parametrize(("number", "first", "status"), [(signal.SIGTERM, _measure, 2), (signal.SIGINT, _fail, 1)])
def test_an_interrupted_run_keeps_what_it_has(
    number: signal.Signals, first: Runner, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, minutes of checks are lost because of the one that takes long."""

    def interrupt(place: Place) -> str:
        assert [outcome["name"] for outcome in json.loads(written.read_text())["outcomes"]] == ["first"]
        os.kill(os.getpid(), number)
        time.sleep(60)
        return ""

    written = tmp_path / "selftest.json"
    checks_of_it = [Check("first", first), Check("interrupted", interrupt), Check("never", _measure)]
    monkeypatch.setattr(run, "CHECKS", checks_of_it)
    output = commopt("selftest", "--device", "cpu", "--output", written, status=status).output
    found = json.loads(written.read_text())
    assert [outcome["name"] for outcome in found["outcomes"]] == ["first"]
    assert not found["is_whole"]
    assert "; interrupted before the others" in output
    assert "running: never" not in output


@pytest.mark.usefixtures("some_checks")
def test_a_run_that_is_interrupted_before_the_first_check_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the command ends with status 2 and without a word, as long as it starts its ranks."""

    def interrupt(device: str) -> NoReturn:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr(run, "find_place", interrupt)
    output = commopt("selftest", "--device", "cpu", status=2).output
    assert output.endswith("commopt: interrupted before the first check\n")


def test_ranks_that_can_run_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a machine on which gloo does not work gets a traceback, and the status of a check that fails."""
    monkeypatch.setattr(ranks, "run_on", mock.Mock(side_effect=RankError(f"rank 0 raised\n{ERROR}")))
    output = commopt("selftest", "--device", "cpu", status=2).output
    assert output.endswith(f"commopt: 2 ranks on the CPU, gloo: {ERROR}\n")


@pytest.mark.usefixtures("some_checks")
def test_no_check_is_started_when_time_is_up() -> None:
    """If it fails, the command takes longer than it says."""
    found = run_selftest("cpu", is_full=True, limit_s=0)
    assert {outcome.status for outcome in found.outcomes} == {"out of time"}
    assert len(found.outcomes) == len(SOME_CHECKS)
    assert found.is_whole


@pytest.mark.usefixtures("some_checks")
def test_checks_that_are_cut_short_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a busy machine that has checked nothing looks as good as one on which everything holds."""
    monkeypatch.setattr(run, "CHECKS", [Check("is late", mock.Mock(side_effect=ranks.OutOfTime), is_on_ranks=False)])
    output = commopt("selftest", "--device", "cpu", "--limit-s", 40, status=2).output
    assert "out of time: is late\n    the 40 s for all checks (--limit-s) were over before this one had ended" in output
    assert output.endswith("1 out of time\n")


def _wait(place: Place) -> None:
    time.sleep(1000)


@pytest.mark.parametrize("is_near", [True, False])
def test_ranks_are_ended_when_time_is_up(is_near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a check that takes long makes the whole take longer, or one that hangs counts as not checked."""
    if not is_near:
        monkeypatch.setattr(ranks, "LIMIT_S", 0.5)
    ends_at = time.monotonic() + (0.5 if is_near else 1000)
    with pytest.raises(ranks.OutOfTime if is_near else RankError):
        ranks.run_on(replace(CPU, ends_at=ends_at), _wait)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_brackets_are_no_markup() -> None:
    """If it fails, an error of gloo ends the command with an error of rich."""
    for is_terminal in (True, False):
        file = _Terminal() if is_terminal else io.StringIO()
        console = Console(file=file, force_terminal=is_terminal, width=200)
        with progress_lines(console) as show:
            show(ERROR)
        outcome = Outcome(name="[/red]", status="failed", detail=ERROR, seconds=1.0)
        found = SelfTest(place="[b]", refused={"[/i]": ERROR}, outcomes=[outcome], is_whole=True, info={})
        print_place(found, console)
        print_outcome(outcome, console)
        print_sum(found, console)
        assert file.getvalue().count("[/opt/gloo/transport]") >= 2


def test_gloo_on_cuda_is_not_held_to_the_profiler() -> None:
    """If it fails, the self-test fails on every machine with one GPU on which NCCL does not run."""
    with pytest.raises(NotChecked, match="gloo"):
        named("collectives take as long").run(Place(name="a GPU", device_type="cuda", backend="gloo"))


def test_streams_are_compared_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a race between streams passes the self-test."""
    ours, theirs = {"int8": "a", "bf16": "b"}, {"int8": "a", "bf16": "c"}
    answers = iter([[ours, ours], [ours, ours], [theirs, theirs]])
    asked: list[tuple[Any, Any]] = []

    def run_on(place: Place, fn: Any, num_streams: int, environment: Any) -> Any:
        asked.append((num_streams, environment))
        return next(answers)

    monkeypatch.setattr(variants, "run_on", run_on)
    with pytest.raises(AssertionError, match="bf16: blocking launches and two streams differ"):
        named("the same bits").run(GPU)
    assert asked == [(2, {}), (1, {}), (2, {"CUDA_LAUNCH_BLOCKING": "1"})]
    answers = iter([[ours, theirs], [ours, ours]])
    with pytest.raises(AssertionError, match="ranks differ"):
        named("the same bits").run(CPU)


def _digests() -> list[dict[str, str]]:
    return [variants.digests(2, CPU, num_steps) for num_steps in (2, 2, 3)]


@pytest.mark.exhaustive
def test_digests_are_of_the_averages() -> None:
    """If it fails, the comparison of streams compares nothing."""
    (first, same, longer), others = run_ranks(_digests)
    assert [first, same, longer] == others
    assert first == same
    assert not set(first.values()) & set(longer.values())
    assert {"all_reduce", "int8", "int4", "powersgd"} <= set(first)


@pytest.mark.exhaustive
def test_the_sanitizer_runs_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, out-of-range accesses are never looked for, or not reported."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotChecked, match="not installed"):
        variants.run_sanitizer("cpu", 120)
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert variants.run_sanitizer("cpu", 120).endswith(" compressors")
    program.write_text('#!/bin/sh\necho "Invalid __global__ write of size 4 bytes"\nexit $2\n')
    with pytest.raises(AssertionError, match="Invalid __global__ write"):
        variants.run_sanitizer("cpu", 120)


def _measured() -> tuple[dict[str, float], float, float, int]:
    return (
        on_device.bucket_cost(Int8(), torch.device("cpu"), ((64, 65), (7,))),
        on_device.step_seconds(CPU, False, 3),
        on_device.step_seconds(CPU, True, 3),
        variants.num_recorded(CPU),
    )


def test_costs_are_measured_and_recorded_collectives_are_counted() -> None:
    for cost, without_s, with_s, num_recorded in run_ranks(_measured):
        assert cost["host_us"] > 0
        assert (cost["launches"], cost["device_us"]) == (0, 0)
        assert cost["bucket_gb_per_s"] == pytest.approx(4 * (64 * 65 + 7) / cost["host_us"] / 1e3)
        assert min(without_s, with_s) > 0
        assert num_recorded == 3 or (torch.__version__ < "2.9" and num_recorded == 0)  # it did not record gloo then


def test_kernels_of_the_profiler_are_counted_without_those_of_nccl() -> None:
    """If it fails, the table of launches and device times is wrong."""

    def event(name: str, microseconds: float, device_type: str = "CUDA") -> Any:
        kind = getattr(torch.autograd.DeviceType, device_type)
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: microseconds))

    events = [event("_encode", 30), event("_decode", 10), event("ncclDevKernel_SendRecv", 99), event("x", 5, "CPU")]
    launches, seconds = on_device.count_kernels(events, 2)
    assert launches == 1
    assert seconds == pytest.approx(20e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["stopped", "failed"])
def test_the_hang_monitor_reports_a_fault(fault: str) -> None:
    """If it fails, the check on a GPU reports nothing, or fails whatever the monitor does."""
    report = variants.report_of(CPU, fault)
    assert (report["ranks"], report["kind"]) == ([1], fault), report["sentence"]
    if fault == "failed":
        assert "an injected fault" in report["sentence"]


def test_the_laws_are_checked_in_several_buckets_only_if_asked_for() -> None:
    assert {check.is_extra for check in CHECKS if check.name.endswith("; in several buckets")} == {True}


def test_what_needs_a_device_is_not_checked_without_one() -> None:
    with pytest.raises(NotChecked, match="no CUDA device"):
        named("compute-sanitizer finds").run(CPU)


def test_the_sanitizer_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ``--full`` takes minutes longer than it says, or a sanitizer that hangs counts as not checked."""
    late = subprocess.TimeoutExpired("compute-sanitizer", 1)
    monkeypatch.setattr(variants, "run_sanitizer", mock.Mock(side_effect=late))
    check = named("compute-sanitizer finds")
    with pytest.raises(ranks.OutOfTime):
        check.run(replace(GPU, ends_at=time.monotonic() + 1))
    with pytest.raises(subprocess.TimeoutExpired):
        check.run(GPU)
