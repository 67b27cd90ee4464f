"""The judge of ``benchmarks/hangs.py`` lets nothing pass that is not what a fault asks for."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hang_faults import FAULTS
from hang_judge import FIRST_STEP, judge

from lightning_commopt.watch.peers import Lifelines, Peers, namespace_name

_SENTENCE = "HangMonitor: rank 1 is stopped (process 7) in forward of step 3\n"
_REPORT = {
    "sentence": "rank 1 is stopped (process 7) in forward of step 3",
    "ranks": [1],
    "kind": "stopped",
    "phase": "forward",
    "step": 3,
    "operation": "the gradient sync of bucket 0 (a, b)",
    "hints": [],
}


def test_what_is_right_passes() -> None:
    """If it fails, the benchmark finds faults with nothing."""
    verdict = judge(FAULTS["stopped"], _REPORT, [_SENTENCE, "", ""])
    assert (verdict.right_rank, verdict.right_phase, verdict.right_operation) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"ranks": [0]}, "right_rank"),
        ({"ranks": [0, 1]}, "right_rank"),
        ({"kind": "late"}, "right_rank"),
        ({"phase": "optimizer"}, "right_phase"),
        ({"operation": None}, "right_operation"),
        ({"operation": "broadcast (3,)"}, "right_operation"),
        ({"operation": "the gradient sync of bucket 1 (a, b)"}, "right_operation"),
    ],
)
def test_what_is_wrong_does_not(changes: dict[str, Any], wrong: str) -> None:
    """If it fails, the benchmark's table is better than the monitor."""
    verdict = judge(FAULTS["stopped"], _REPORT | changes, [_SENTENCE, "", ""])
    passed = {key for key in ("right_rank", "right_phase", "right_operation") if getattr(verdict, key)}
    assert passed == {"right_rank", "right_phase", "right_operation"} - {wrong}


@pytest.mark.parametrize("outputs", [["", "", ""], [_SENTENCE, "", _SENTENCE], [_SENTENCE * 2, "", ""]])
def test_a_report_is_seen_once(outputs: list[str]) -> None:
    """If it fails, a file on a disk counts as reported, or one report over the other does."""
    assert not judge(FAULTS["stopped"], _REPORT, outputs).right_rank


def test_a_rank_that_is_cut_off_reports_by_itself() -> None:
    """If it fails, two hosts that cannot reach each other must agree on who reports."""
    fault = replace(FAULTS["stopped"], is_cut_off=True)
    assert judge(fault, _REPORT, [_SENTENCE, _SENTENCE, ""]).right_rank
    assert not judge(fault, _REPORT, ["", _SENTENCE, ""]).right_rank


def test_a_sentence_must_name_the_hook() -> None:
    """If it fails, a report passes that does not name whose callback it is, or in which hook of it."""
    fault = FAULTS["batch_end"]
    for text, is_right in {
        "rank 1 is still in callback Upload.on_train_batch_end of step 3": True,
        "rank 0 is still in callback Upload.on_train_batch_end of step 3": False,
        "rank 1 is still in callback Upload.on_train_batch_start of step 3": False,
        "rank 1 is still in callbacks of step 3 (code.py:3 in on_train_batch_end)": False,
    }.items():
        assert judge(fault, _REPORT | {"sentence": text}, ["", ""]).right_sentence == is_right


def test_a_message_that_is_enough() -> None:
    """If it fails, a report is asked for where all ranks have ended by themselves, or any message passes."""
    fault = FAULTS["interrupt"]
    found = judge(fault, None, ["Rank 1 has ended the fit with KeyboardInterrupt().", ""])
    assert (found.right_rank, found.right_phase, found.right_operation, found.right_sentence) == (True,) * 4
    assert not judge(fault, None, ["Rank 0 has ended the fit with KeyboardInterrupt().", ""]).is_reported


def test_an_operation_where_there_is_none() -> None:
    """If it fails, a report passes that names an operation in which nobody is."""
    fault = replace(FAULTS["stopped"], operation=None)
    assert not judge(fault, _REPORT, [_SENTENCE]).right_operation
    assert judge(fault, _REPORT | {"operation": None}, [_SENTENCE]).right_operation


def _death(rank: int) -> str:
    """Returns the message about a rank whose process there is no more."""
    store = dist.HashStore()
    store.set(f"process/{rank}", f"{namespace_name('pid')} {2**22 + 1} 0")
    peers = Peers(store, 0, 3, (0, rank), Lifelines(store, 0, [0], "localhost"))
    peers.learn()
    failure = peers.failure()
    assert failure is not None
    return failure.text


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        ([_death(1), "", ""], True),
        ([_death(2), "", ""], False),
        (["", _death(1), ""], False),
        (["Connection closed by peer", "", ""], False),
    ],
)
def test_messages_of_the_strategy(outputs: list[str], is_right: bool) -> None:
    """If it fails, torch's own error counts, or what only the faulty rank has printed, or our message does not."""
    verdict = judge(FAULTS["killed"], None, outputs)
    assert (verdict.is_reported, verdict.right_rank) == (is_right, is_right)
    assert not verdict.right_phase
    assert not verdict.right_operation


_UNEVEN = "Ranks have different numbers of training batches: 12 batches on rank 0; 5 batches on rank 1."
_ABSENT = "rank 0 on a waits at 10.0.0.1:29500 for rank 2; ranks 0, 1 are here. Look whether it was started."


@pytest.mark.parametrize(
    ("fault", "output", "right"),
    [
        ("uneven", _UNEVEN, (True, True, True)),
        ("uneven", f"{FIRST_STEP}\n{_UNEVEN}", (True, False, True)),
        ("uneven", _UNEVEN.replace(" on rank 0", " on rank 0 in all_reduce"), (True, True, False)),
        ("uneven", f"{_SENTENCE}{_UNEVEN}", (False, True, True)),
        ("absent", f"RuntimeError: {_ABSENT}", (True, True, True)),
        ("absent", f"RuntimeError: {_ABSENT.removeprefix('rank 0 on a ')}", (True, True, False)),
        ("absent", _ABSENT.replace("rank 2", "rank 3"), (False, False, False)),
    ],
)
def test_messages_before_training(fault: str, output: str, right: tuple[bool, bool, bool]) -> None:
    """If it fails, a message passes that comes late, or has too little or too much."""
    verdict = judge(FAULTS[fault], None, [output, ""])
    assert (verdict.right_rank, verdict.right_phase, verdict.right_operation) == right
