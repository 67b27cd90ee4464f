"""HangMonitor, on real ranks of which one keeps the others waiting."""

from pathlib import Path
from typing import Any

import pytest
from hanging_fits import fit_slowly, fit_with_faults
from marked_processes import Program

from lightning_commopt.callbacks import HangMonitor
from lightning_commopt.watch.hangs.reading import read_left_behind
from ranks import run_ranks

_FAULTS = [("forward", "ddp"), ("stopped", "int8")]
_MORE_FAULTS = [
    *((fault, strategy) for fault in ("forward", "stopped") for strategy in ("ddp", "native", "int8")),
    ("callbacks", "native"),
]
_SYNC = "rank 0 waits in the gradient sync of bucket 0 (layers.*) of step 4"


@pytest.mark.parametrize(
    "faults", [_FAULTS, pytest.param(_MORE_FAULTS, marks=pytest.mark.exhaustive)], ids=["some", "more"]
)
def test_the_rank_that_is_waited_for_is_named(faults: list[tuple[str, str]], tmp_path: Path) -> None:
    """If it fails, a hang is not reported, or somebody else is blamed for it."""
    reports, same = run_ranks(fit_with_faults, tmp_path, faults)
    assert reports == same
    for (fault, strategy), report in zip(faults, reports, strict=True):
        check(fault, report)
        snapshots = {each.rank: each for each in read_left_behind(tmp_path / f"{fault}-{strategy}").snapshots}
        assert any("hanging_fits.py" in frame for frame in frames_of(snapshots[1])) == (fault != "stopped")


def check(fault: str, report: dict[str, Any]) -> None:
    assert report["ranks"] == [1]
    assert report["step"] == 4
    assert report["sentence"].endswith(_SYNC) or fault == "callbacks", report["sentence"]
    assert report["hints"]
    if fault == "stopped":
        assert (report["kind"], report["phase"]) == ("stopped", "forward")
        assert report["sentence"].startswith("rank 1 is stopped (process ")
    else:
        assert (report["kind"], report["phase"]) == ("late", "optimizer" if fault == "callbacks" else "forward")
        assert report["sentence"].startswith("rank 1 is still in ")
        assert "hanging_fits.py" in report["sentence"]


def frames_of(snapshot: Any) -> list[str]:
    return [frame for threads in snapshot.stacks.values() for frames in threads.values() for frame in frames]


@pytest.mark.exhaustive
def test_phases_that_take_long_are_no_hangs(tmp_path: Path) -> None:
    """If it fails, a first forward, a validation, a checkpoint or a test raises a false alarm."""
    assert run_ranks(fit_slowly, tmp_path, 2.0) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "int8"])
def test_abort_ends_all_ranks(strategy: str, tmp_path: Path) -> None:
    """If it fails, ranks in different collectives are not told apart, or a job that is dead keeps its devices."""
    program = Program([str(Path(__file__).parent / "hanging_fits.py"), str(tmp_path), "collective", strategy], tmp_path)
    try:
        assert program.wait(120), f"{program.processes()} are left: {program.output}"
    finally:
        program.kill()
    assert program.process.returncode != 0
    (sentence,) = [line for line in program.output.splitlines() if line.startswith("HangMonitor: ")]
    assert "rank 1 has" in sentence, sentence
    assert "all_gather (3,)" in sentence, sentence
    found = read_left_behind(tmp_path)
    assert (found.diagnosis.kind, found.diagnosis.ranks) == ("mismatch", (1,))
    assert f"HangMonitor: {found.diagnosis.sentence}" == sentence


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("after_s", 0, "after_s must be a number above 0, got 0"),
        ("after_s", float("nan"), "after_s must be a number above 0, got nan"),
        ("after_s", "60", "after_s must be a number above 0, got '60'"),
        ("action", "kill", "action must be one of 'report', 'abort', got 'kill'"),
    ],
)
def test_bad_options_are_refused(option: str, value: Any, message: str) -> None:
    """If it fails, a mistake shows itself when the run hangs."""
    with pytest.raises(ValueError, match=message):
        HangMonitor(**{option: value})
