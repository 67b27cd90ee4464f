"""Whether what was reported of a fault is what must be reported of it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hang_faults import Fault

MONITOR_LINE = re.compile(r"^HangMonitor: .+", re.MULTILINE)
FIRST_STEP = "FIRST STEP"
"""What each rank prints when it begins to train."""

_ANY_OPERATION = re.compile(r"gradient sync|all_?reduce|broadcast|all_?gather|barrier")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one run has reported, compared with what it must.

    Attributes:
        is_reported: something of ours was printed at all.
        right_rank: the rank at fault was named, with the right reason, and no other; all of that once.
        right_phase: as the fault asks; of a message before training, that no rank has begun a step.
        right_operation: as the fault asks, also where it asks for none.
        right_sentence: it has what else the fault asks for.
        source: "report" or "message"; None if nothing was reported.
        sentence: what was reported.
    """

    is_reported: bool
    right_rank: bool
    right_phase: bool
    right_operation: bool
    right_sentence: bool
    source: str | None
    sentence: str | None


def read_report(folder: Path) -> dict[str, Any] | None:
    """Returns the report of a `HangMonitor`; None if there is none, or it is still being written."""
    try:
        report = json.loads((folder / "hangs" / "report.json").read_text())
    except (OSError, ValueError):
        return None
    assert isinstance(report, dict)
    return report


def judge(fault: Fault, report: Mapping[str, Any] | None, outputs: Sequence[str]) -> Verdict:
    """Judges one run by its report if there is one, else by what `CommOptDDP` has printed by itself.

    Args:
        fault: that was injected.
        report: from `read_report`.
        outputs: stdout and stderr of each rank.
    """
    heard = [output for rank, output in enumerate(outputs) if not (fault.is_cut_off and rank == fault.rank)]
    num_printed = sum(len(MONITOR_LINE.findall(output)) for output in heard)
    if report is not None:
        return Verdict(
            is_reported=num_printed > 0,
            right_rank=num_printed == 1 and report["kind"] in fault.kinds and list(report["ranks"]) == [fault.rank],
            right_phase=report["phase"] in fault.phases,
            right_operation=_is_operation(fault.operation, report["operation"]),
            right_sentence=re.search(_of(fault, fault.sentence), report["sentence"]) is not None,
            source="report",
            sentence=report["sentence"],
        )
    found = find_message(fault, outputs)
    if fault.message is None or found is None:
        return Verdict(
            is_reported=False,
            right_rank=False,
            right_phase=False,
            right_operation=False,
            right_sentence=False,
            source=None,
            sentence=None,
        )
    message, (sentence, lines) = fault.message, found
    has_begun = any(FIRST_STEP in output for output in outputs)
    if message.operation is None:
        has_operation = _ANY_OPERATION.search(sentence) is None
    else:
        has_operation = re.search(_of(fault, message.operation), lines) is not None
    return Verdict(
        is_reported=True,
        right_rank=num_printed == 0,
        right_phase=message.is_enough or (message.is_before_training and not has_begun),
        right_operation=message.is_enough or (message.is_before_training and has_operation),
        right_sentence=re.search(_of(fault, fault.sentence), lines) is not None,
        source="message",
        sentence=sentence,
    )


def find_message(fault: Fault, outputs: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first thing that `CommOptDDP` prints of a fault that is right, and the lines that it stands in.

    Returns:
        None if there is none.
    """
    message = fault.message
    for rank, output in enumerate(outputs):
        if message is not None and (rank != fault.rank or message.is_own):
            found = re.search(_of(fault, message.pattern), output)
            if found:
                start = output.rfind("\n", 0, found.start()) + 1
                return found[0], output[start : found.end()]
    return None


def _of(fault: Fault, pattern: str) -> str:
    return pattern.replace("{rank}", str(fault.rank))


def _is_operation(pattern: str | None, operation: str | None) -> bool:
    if pattern is None or operation is None:
        return pattern is None and operation is None
    return re.search(pattern, operation) is not None
