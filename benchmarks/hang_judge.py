"""What must be told of each fault, written down before any run, and whether it was."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MONITOR_LINE = re.compile(r"^HangMonitor: .+", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, the job that it happens in, and what must be told of it.

    Attributes:
        what: in words.
        rank: the rank at fault, which must be the only one that is named.
        kinds: of a `HangMonitor`'s report that are right.
        phases: that are right: that of the rank at fault, or that in which the others wait for it.
        operation: pattern of the operation that ranks wait in; None where they wait in none of ours.
        message: pattern of what `CommOptDDP` says by itself, on stderr of a rank other than that at fault; None where
            it says nothing. ``{rank}`` is the rank at fault.
        own_message: pattern that counts on stderr of the rank at fault too, as only it can know.
        world_size: number of ranks; 3 where collectives are compared, as of two that differ neither is the odd one.
        needs_lab: each rank is on a host of its own.
        strategies: that can tell of it.
        is_survivor: the process of the rank at fault cannot end by itself.
    """

    what: str
    rank: int = 1
    kinds: Collection[str] = ()
    phases: Collection[str] = ()
    operation: str | None = None
    message: str | None = None
    own_message: str | None = None
    world_size: int = 2
    needs_lab: bool = False
    strategies: Collection[str] = ("ddp", "commopt")
    is_survivor: bool = False


_SYNC = r"(?i)gradient sync of bucket \d+|all_?reduce"
_REDUCE_OF_3 = r"(?i)all_?reduce \((3|4),\)"
_STEP = ("forward", "backward")
FAULTS: dict[str, Fault] = {
    "stopped": Fault(
        what="stopped (SIGSTOP)", kinds=("stopped",), phases=_STEP, operation=_SYNC, world_size=3, is_survivor=True
    ),
    "killed": Fault(
        what="killed (SIGKILL)",
        kinds=("died",),
        phases=_STEP,
        operation=_SYNC,
        message=r"Rank {rank} has died: its process \d+ has gone",
        world_size=3,
    ),
    "exception": Fault(
        what="exception",
        kinds=("failed",),
        phases=_STEP,
        operation=_SYNC,
        message=r"(?s)Rank {rank} has failed:.*ArithmeticError: broken on purpose",
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
        message=r"Ranks have different numbers of training batches: .*5 batches on rank {rank}",
    ),
    "logging": Fault(
        what="self.log(sync_dist=True) on one rank",
        kinds=("mismatch", "waiting"),
        phases=_STEP,
        operation=_SYNC + r"|all_?reduce \((1,)?\)",
        world_size=3,
    ),
    "worker": Fault(what="dataloader worker sleeps", kinds=("late",), phases=("data",), operation=_SYNC),
    "unused": Fault(
        what="unused parameter on one rank",
        kinds=("failed", "mismatch", "late"),
        phases=_STEP,
        operation=_SYNC,
        message=r"(?s)Rank {rank} has failed:.*parameters that were not used in producing the loss",
        world_size=3,
    ),
    "order": Fault(
        what="two collectives in another order",
        kinds=("mismatch",),
        phases=("forward",),
        operation=r"(?i)(broadcast|all_?reduce) \(3,\)",
        world_size=3,
    ),
    "network": Fault(what="network gone", kinds=("unreachable",), phases=_STEP, operation=_SYNC, needs_lab=True),
    "interface": Fault(
        what="wrong GLOO_SOCKET_IFNAME",
        message=r"rank {rank} on \S+ listens on 9\.9\.9\.9 \(wrong0.*Set GLOO_SOCKET_IFNAME=eth0 on rank {rank}\.",
        needs_lab=True,
        strategies=("commopt",),
    ),
    "port": Fault(
        what="port blocked at the start",
        own_message=r"rank {rank} on \S+ cannot come to rank 0: 10\.0\.0\.1:29500 does not answer .*firewall.*",
        needs_lab=True,
        strategies=("commopt",),
    ),
    "absent": Fault(
        what="a host never comes",
        rank=2,
        message=r"waits at 10\.0\.0\.1:29500 for rank {rank}; ranks 0, 1 are here.*",
        world_size=3,
        needs_lab=True,
        strategies=("commopt",),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one run has told, held against what it must; None where nothing is to be judged.

    Attributes:
        is_told: something of ours was said at all.
        right_rank: the rank at fault was named, with the right reason, and no other.
        right_phase: as the fault asks; None where a message told, which has no phase.
        right_operation: the same for the operation.
        source: "report" or "message"; None if nothing was told.
        sentence: what was told.
    """

    is_told: bool
    right_rank: bool
    right_phase: bool | None
    right_operation: bool | None
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
    if report is not None:
        is_right_kind = report["kind"] in fault.kinds
        operation = report["operation"]
        is_printed = any(MONITOR_LINE.search(output) for output in outputs)
        return Verdict(
            is_told=is_printed,
            right_rank=is_printed and is_right_kind and list(report["ranks"]) == [fault.rank],
            right_phase=report["phase"] in fault.phases,
            right_operation=operation is not None and _matches(fault.operation, operation),
            source="report",
            sentence=report["sentence"],
        )
    sentence = find_message(fault, outputs)
    return Verdict(
        is_told=sentence is not None,
        right_rank=sentence is not None,
        right_phase=None,
        right_operation=None,
        source=None if sentence is None else "message",
        sentence=sentence,
    )


def find_message(fault: Fault, outputs: Sequence[str]) -> str | None:
    """Returns the first thing that `CommOptDDP` says of a fault that is right; None if there is none."""
    for rank, output in enumerate(outputs):
        for pattern in (fault.message if rank != fault.rank else None, fault.own_message):
            found = re.search(pattern.replace("{rank}", str(fault.rank)), output) if pattern else None
            if found:
                return found[0]
    return None


def _matches(pattern: str | None, text: str) -> bool:
    return pattern is not None and re.search(pattern, text) is not None
