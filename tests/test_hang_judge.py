"""The judge of ``benchmarks/hangs.py`` lets nothing pass that is not what a fault asks for."""

from typing import Any

import pytest
from hang_judge import FAULTS, judge

_SENTENCE = "HangMonitor: rank 1 is stopped (process 7) in forward of step 3\n"
_REPORT = {
    "sentence": "rank 1 is stopped (process 7) in forward of step 3",
    "ranks": [1],
    "kind": "stopped",
    "phase": "forward",
    "step": 3,
    "operation": "gradient sync of bucket 0",
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
    ],
)
def test_what_is_wrong_does_not(changes: dict[str, Any], wrong: str) -> None:
    """If it fails, the benchmark's table is better than the monitor."""
    verdict = judge(FAULTS["stopped"], _REPORT | changes, [_SENTENCE, "", ""])
    passed = {key for key in ("right_rank", "right_phase", "right_operation") if getattr(verdict, key)}
    assert passed == {"right_rank", "right_phase", "right_operation"} - {wrong}


def test_a_report_that_nobody_sees_does_not_count() -> None:
    """If it fails, a file on a disk counts as told."""
    assert not judge(FAULTS["stopped"], _REPORT, ["", "", ""]).right_rank


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        (["Rank 1 has died: its process 12 has gone in the middle of the fit.", "", ""], True),
        (["Rank 2 has died: its process 12 has gone in the middle of the fit.", "", ""], False),
        (["", "Rank 1 has died: its process 12 has gone in the middle of the fit.", ""], False),
        (["Connection closed by peer", "", ""], False),
    ],
)
def test_messages_of_the_strategy(outputs: list[str], is_right: bool) -> None:
    """If it fails, torch's own error counts, or what only the faulty rank has said."""
    verdict = judge(FAULTS["killed"], None, outputs)
    assert (verdict.is_told, verdict.right_rank) == (is_right, is_right)
    assert verdict.right_phase is verdict.right_operation is None
