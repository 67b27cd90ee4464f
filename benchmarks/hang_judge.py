"""What must be told of each fault, written down before any run, and whether it was."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITOR_LINE = re.compile(r"^HangMonitor: .+", re.MULTILINE)
FIRST_STEP = "FIRST STEP"
"""What each rank prints when it begins to train."""

_ANY_OPERATION = re.compile(r"gradient sync|all_?reduce|broadcast|all_?gather|barrier")
_AFTER_S = 5.0
_REPORT_S = _AFTER_S + 10.0
_GROUP_TIMEOUT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Message:
    """What `CommOptDDP` says of a fault by itself, on stderr of a rank other than that at fault.

    Attributes:
        pattern: of what it says; ``{rank}`` is the rank at fault.
        is_own: whether it counts on stderr of the rank at fault too, as only it can know.
        is_before_training: it comes before the first step, and tells all that there is to tell. Another one leaves it
            to a `HangMonitor` to tell the phase and the operation.
        operation: pattern of what it says that ranks do; None where they are in no operation, and it must name none.
    """

    pattern: str
    is_own: bool = False
    is_before_training: bool = False
    operation: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, the job that it happens in, and what must be told of it.

    Attributes:
        what: in words.
        rank: the rank at fault, which must be the only one that is named.
        kinds: of a `HangMonitor`'s report that are right; none where it must come to no report.
        phases: that are right.
        operation: pattern of the operation that a report must name.
        message: of `CommOptDDP`; None where it says nothing.
        world_size: number of ranks; 3 where collectives are compared, as of two that differ neither is the odd one.
        needs_lab: each rank is on a host of its own.
        strategies: that can tell of it.
        is_cut_off: the rank at fault is out of reach, so it tells by itself which others it cannot reach.
        is_survivor: the process of the rank at fault cannot end by itself.
        group_timeout_s: of the process group.
        limit_s: from the fault until it must have been told: ``after_s`` and 10 s, or the group's timeout where the
            group does not come about.
    """

    what: str
    rank: int = 1
    kinds: Collection[str] = ()
    phases: Collection[str] = ()
    operation: str | None = None
    message: Message | None = None
    world_size: int = 2
    needs_lab: bool = False
    strategies: Collection[str] = ("ddp", "commopt")
    is_cut_off: bool = False
    is_survivor: bool = False
    group_timeout_s: float = 300.0
    limit_s: float = _REPORT_S


_SYNC = r"^the gradient sync of bucket 0 \("
_REDUCE_OF_3 = r"^all_?reduce \(3,\)"
_STEP = ("forward", "backward")
FAULTS: dict[str, Fault] = {
    "stopped": Fault(
        what="stopped (SIGSTOP)",
        kinds=("stopped",),
        phases=("forward",),
        operation=_SYNC,
        world_size=3,
        is_survivor=True,
    ),
    "killed": Fault(
        what="killed (SIGKILL)",
        kinds=("died",),
        phases=("forward",),
        operation=_SYNC,
        message=Message(pattern=r"Rank {rank} has died: its process \d+ has gone"),
        world_size=3,
    ),
    "exception": Fault(
        what="exception",
        kinds=("failed",),
        phases=("forward",),
        operation=_SYNC,
        message=Message(pattern=r"(?s)Rank {rank} has failed:.*ArithmeticError: broken on purpose"),
        world_size=3,
    ),
    "skipped": Fault(
        what="skips a collective",
        kinds=("mismatch", "waiting", "late"),
        phases=_STEP,
        operation=_REDUCE_OF_3,
        world_size=3,
    ),
    "sizes": Fault(
        what="tensor of another size", kinds=("mismatch",), phases=("forward",), operation=_REDUCE_OF_3, world_size=3
    ),
    "uneven": Fault(
        what="fewer batches",
        kinds=("ended",),
        phases=("backward", "data", "callbacks", "validation"),
        operation=_SYNC,
        message=Message(
            pattern=r"Ranks have different numbers of training batches: .*5 batches on rank {rank}",
            is_before_training=True,
        ),
    ),
    "logging": Fault(
        what="self.log(sync_dist=True) on one rank",
        kinds=("mismatch", "waiting"),
        phases=_STEP,
        operation=_SYNC,
        world_size=3,
    ),
    "worker": Fault(what="dataloader worker sleeps", kinds=("late",), phases=("data",), operation=_SYNC),
    "unused": Fault(
        what="unused parameter on one rank",
        kinds=("failed", "mismatch", "late"),
        phases=_STEP,
        operation=_SYNC,
        message=Message(pattern=r"(?s)Rank {rank} has failed:.*parameters that were not used in producing the loss"),
        world_size=3,
    ),
    "order": Fault(
        what="two collectives in another order",
        kinds=("mismatch",),
        phases=("forward",),
        operation=r"^broadcast \(3,\)",
        world_size=3,
    ),
    "network": Fault(
        what="network gone",
        kinds=("unreachable",),
        phases=("backward",),
        operation=_SYNC,
        needs_lab=True,
        is_cut_off=True,
    ),
    "interface": Fault(
        what="wrong GLOO_SOCKET_IFNAME",
        message=Message(
            pattern=r"rank {rank} on \S+ listens on 9\.9\.9\.9 \(wrong0.*Set GLOO_SOCKET_IFNAME=eth0 on rank {rank}\.",
            is_before_training=True,
            operation=r"all 2 ranks have come to 10\.0\.0\.1:29500, but ranks 0, 1 have not connected to the others",
        ),
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
    "port": Fault(
        what="port blocked at the start",
        message=Message(
            pattern=r"rank {rank} on \S+ cannot come to rank 0: 10\.0\.0\.1:29500 does not answer .*firewall.*",
            is_own=True,
            is_before_training=True,
            operation=r"rank {rank} on \S+ cannot come to rank 0: 10\.0\.0\.1:29500 does not answer",
        ),
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
    "absent": Fault(
        what="a host never comes",
        rank=2,
        message=Message(
            pattern=r"waits at 10\.0\.0\.1:29500 for rank {rank}; ranks 0, 1 are here.*",
            is_before_training=True,
            operation=r"rank 0 on \S+ waits at 10\.0\.0\.1:29500 for rank {rank};",
        ),
        world_size=3,
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one run has told, held against what it must.

    Attributes:
        is_told: something of ours was said at all.
        right_rank: the rank at fault was named, with the right reason, and no other; all of that once.
        right_phase: as the fault asks; of a message before training, that no rank has begun a step.
        right_operation: as the fault asks, also where it asks for none.
        source: "report" or "message"; None if nothing was told.
        sentence: what was told.
    """

    is_told: bool
    right_rank: bool
    right_phase: bool
    right_operation: bool
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
    """Judges one run by its report if there is one, else by what `CommOptDDP` has said by itself.

    Args:
        fault: that was injected.
        report: from `read_report`.
        outputs: stdout and stderr of each rank.
    """
    heard = [output for rank, output in enumerate(outputs) if not (fault.is_cut_off and rank == fault.rank)]
    num_printed = sum(len(MONITOR_LINE.findall(output)) for output in heard)
    if report is not None:
        return Verdict(
            is_told=num_printed > 0,
            right_rank=num_printed == 1 and report["kind"] in fault.kinds and list(report["ranks"]) == [fault.rank],
            right_phase=report["phase"] in fault.phases,
            right_operation=_is_operation(fault.operation, report["operation"]),
            source="report",
            sentence=report["sentence"],
        )
    found = find_message(fault, outputs)
    if fault.message is None or found is None:
        return Verdict(
            is_told=False, right_rank=False, right_phase=False, right_operation=False, source=None, sentence=None
        )
    message, (sentence, lines) = fault.message, found
    has_begun = any(FIRST_STEP in output for output in outputs)
    if message.operation is None:
        has_operation = _ANY_OPERATION.search(sentence) is None
    else:
        has_operation = re.search(_of(fault, message.operation), lines) is not None
    return Verdict(
        is_told=True,
        right_rank=num_printed == 0,
        right_phase=message.is_before_training and not has_begun,
        right_operation=message.is_before_training and has_operation,
        source="message",
        sentence=sentence,
    )


def find_message(fault: Fault, outputs: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first thing that `CommOptDDP` says of a fault that is right, and the lines that it stands in.

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
